mod contents;
mod device;
mod hostile;
mod many;
mod names;

use std::fs;
use std::path::Path;

use virtiofsd::fuse::{
    CreateIn, EntryOut, ForgetIn, Opcode, OpenOut, ReleaseIn, Rename2In, WriteIn,
};

use super::fake_guest::{Guest, Reply, bytes, config, name, parse};

fn directory() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn create(guest: &mut Guest, parent: u64, entry: &str, mode: u32, flags: i32) -> (EntryOut, u64) {
    let body = CreateIn {
        flags: flags as u32,
        mode,
        umask: 0o22,
        open_flags: 0,
    };
    let reply = guest
        .call(Opcode::Create, parent, &[bytes(body), name(entry)].concat())
        .unwrap();
    let open: OpenOut = parse(&reply[size_of::<EntryOut>()..]);
    (parse(&reply), open.fh)
}

fn write(guest: &mut Guest, node: u64, fh: u64, offset: u64, data: &[u8], flags: u32) -> Reply {
    let body = WriteIn {
        fh,
        offset,
        size: data.len() as u32,
        write_flags: flags,
        ..Default::default()
    };
    guest.call(Opcode::Write, node, &[bytes(body), data.to_vec()].concat())
}

fn rename(guest: &mut Guest, from: (u64, &str), to: (u64, &str), flags: u32) -> Reply {
    let body = Rename2In {
        newdir: to.0,
        flags,
        padding: 0,
    };
    let body = [bytes(body), name(from.1), name(to.1)].concat();
    guest.call(Opcode::Rename2, from.0, &body)
}

fn release(guest: &mut Guest, node: u64, fh: u64) {
    let body = bytes(ReleaseIn {
        fh,
        ..Default::default()
    });
    guest.call(Opcode::Release, node, &body).unwrap();
}

fn forget(guest: &mut Guest, node: u64, nlookup: u64) {
    guest.tell(Opcode::Forget, node, &bytes(ForgetIn { nlookup }));
}

#[test]
fn a_guest_mounts_and_reads() {
    let dir = directory();
    fs::write(dir.path().join("hello"), "world").unwrap();
    let mut guest = Guest::new(&config(dir.path()));
    let init = guest.init();
    assert_eq!((init.major, init.max_write), (7, 1 << 20));
    let root = guest.attributes(1).unwrap();
    assert_eq!(root.attr.mode & libc::S_IFMT, libc::S_IFDIR);
    assert_eq!(guest.content("hello").unwrap(), b"world");
    assert_eq!(guest.call(Opcode::Getattr, 99, &[0; 16]), Err(libc::ESTALE));
}

fn many_files(dir: &Path, directories: usize, files: usize) {
    for d in 0..directories {
        let sub = dir.join(format!("d{d}"));
        fs::create_dir(&sub).unwrap();
        for f in 0..files {
            fs::write(sub.join(format!("f{f}")), format!("{d}/{f}")).unwrap();
        }
    }
}
