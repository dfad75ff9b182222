use std::fs;

use virtiofsd::fuse::Opcode;

use super::fake_guest::{Guest, config};

#[test]
fn a_guest_mounts_and_reads() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("hello"), "world").unwrap();
    let mut guest = Guest::new(&config(dir.path()));
    let init = guest.init();
    assert_eq!((init.major, init.max_write), (7, 1 << 20));
    let root = guest.attributes(1).unwrap();
    assert_eq!(root.attr.mode & libc::S_IFMT, libc::S_IFDIR);
    assert_eq!(guest.content("hello").unwrap(), b"world");
    assert_eq!(guest.call(Opcode::Getattr, 99, &[0; 16]), Err(libc::ESTALE));
}
