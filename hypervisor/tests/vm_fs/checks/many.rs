//! Many files, and many who write them.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::thread;

use super::*;

pub fn a_thousand_small_files(dir: &Path) {
    for d in 0..20 {
        let sub = dir.join(format!("d{d}"));
        fs::create_dir(&sub).unwrap();
        for f in 0..50 {
            fs::write(sub.join(format!("f{f}")), format!("{d} {f}")).unwrap();
        }
    }
    assert_eq!(crate::guest::walk(dir), 20 * 51);
    for d in 0..20 {
        for f in (0..50).step_by(7) {
            let path = dir.join(format!("d{d}/f{f}"));
            assert_eq!(fs::read_to_string(path).unwrap(), format!("{d} {f}"));
        }
    }
    for d in 0..20 {
        fs::remove_dir_all(dir.join(format!("d{d}"))).unwrap();
    }
    assert_eq!(fs::read_dir(dir).unwrap().count(), 0);
}

pub fn two_thousand_files_are_open_at_once(dir: &Path) {
    let limit = libc::rlimit {
        rlim_cur: 4096,
        rlim_max: 4096,
    };
    // SAFETY: a valid structure.
    ok(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &limit) });
    let mut files: Vec<File> = (0..2000)
        .map(|n| {
            let path = dir.join(format!("{n}"));
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .open(path)
                .unwrap();
            write!(file, "{n}").unwrap();
            file
        })
        .collect();
    for (n, file) in files.iter_mut().enumerate() {
        fs::remove_file(dir.join(format!("{n}"))).unwrap();
        file.seek(SeekFrom::Start(0)).unwrap();
        let mut content = String::new();
        file.read_to_string(&mut content).unwrap();
        assert_eq!(content, n.to_string());
    }
}

pub fn many_threads_write_their_own_files(dir: &Path) {
    let threads: Vec<_> = (0..16u8)
        .map(|number| {
            let path = dir.join(format!("{number}"));
            thread::spawn(move || {
                for round in 0..20 {
                    let data = vec![number; 10_000 + round];
                    fs::write(&path, &data).unwrap();
                    assert!(fs::read(&path).unwrap() == data);
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
}
