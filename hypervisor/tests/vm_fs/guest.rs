//! The guest's side: this program as `/init`. It mounts the share and runs what the host names, on the
//! directory that the host names.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::thread;

use crate::checks::CHECKS;
use crate::common::twin::{HOST_LINES, connect};

/// Where the share is mounted.
pub const SHARE: &str = "/share";

pub fn serve() -> io::Result<()> {
    for (kind, target) in [("proc", "/proc"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")] {
        mount(kind, kind, target)?;
    }
    mount("share", "virtiofs", SHARE)?;
    let stream = connect(HOST_LINES)?;
    let mut lines = stream.try_clone()?;
    writeln!(lines, "ready")?;
    for order in BufReader::new(stream).lines() {
        let order = order?;
        let (check, directory) = order.split_once(' ').unwrap_or((&order, ""));
        let answer = match run(check, Path::new(directory)) {
            Ok(answer) => format!("ok {answer}"),
            Err(error) => format!("failed: {}", error.replace('\n', " ")),
        };
        writeln!(lines, "{answer}")?;
    }
    Ok(())
}

fn run(name: &str, directory: &Path) -> Result<String, String> {
    if let Some((_, check)) = CHECKS.iter().find(|(known, _)| *known == name) {
        let (check, directory) = (*check, directory.to_owned());
        return joined(move || {
            fs::create_dir(&directory).unwrap();
            check(&directory);
            String::new()
        });
    }
    let directory: PathBuf = directory.to_owned();
    match name {
        "read" => joined(move || fs::read_to_string(&directory).unwrap()),
        "list" => joined(move || {
            let names = fs::read_dir(&directory).unwrap();
            let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
            let mut names: Vec<_> = names.collect();
            names.sort();
            names.join(" ")
        }),
        "device" => joined(move || {
            use std::os::unix::fs::MetadataExt;
            fs::metadata(&directory).unwrap().dev().to_string()
        }),
        "walk" => joined(move || walk(&directory).to_string()),
        "read_mib" => joined(move || fs::read(&directory).unwrap().len().to_string()),
        "read_small" => joined(move || {
            inside(&directory, || {
                for n in 0..200 {
                    fs::read(format!("small{n}")).unwrap();
                }
            })
        }),
        "write_small" => joined(move || {
            fs::create_dir(&directory).unwrap();
            inside(&directory, || {
                for n in 0..200 {
                    fs::write(format!("small{n}"), "x").unwrap();
                }
            })
        }),
        "unmount" => joined(move || {
            let target = std::ffi::CString::new(directory.to_str().unwrap()).unwrap();
            // SAFETY: a valid string.
            let done = unsafe { libc::umount2(target.as_ptr(), 0) };
            assert_eq!(done, 0, "{}", io::Error::last_os_error());
            String::new()
        }),
        "drop_caches" => joined(|| {
            fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
            String::new()
        }),
        _ => Err(format!("there is no check {name}")),
    }
}

/// Runs `work` where names need no look-up of what lies above, as in a container.
fn inside(directory: &Path, work: impl FnOnce()) -> String {
    std::env::set_current_dir(directory).unwrap();
    work();
    std::env::set_current_dir("/").unwrap();
    String::new()
}

/// The number of files below `directory`, each of them asked for its attributes.
pub fn walk(directory: &Path) -> u64 {
    let mut count = 0;
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        count += 1;
        if fs::symlink_metadata(&path).unwrap().is_dir() {
            count += walk(&path);
        }
    }
    count
}

/// What `check` returns, or with which words it ends.
fn joined(check: impl FnOnce() -> String + Send + 'static) -> Result<String, String> {
    thread::spawn(check).join().map_err(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        text.unwrap_or_else(|| "it panicked".to_owned())
    })
}

fn mount(source: &str, kind: &str, target: &str) -> io::Result<()> {
    fs::create_dir_all(target)?;
    let text = |s: &str| std::ffi::CString::new(s).unwrap();
    let (source, kind, target) = (text(source), text(kind), text(target));
    // SAFETY: all are valid strings.
    let done = unsafe {
        libc::mount(
            source.as_ptr(),
            target.as_ptr(),
            kind.as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
