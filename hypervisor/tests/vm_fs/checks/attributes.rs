//! Owners, modes, times, extended attributes and what they permit.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use super::*;

pub fn owners_modes_and_times_are_kept(dir: &Path) {
    let file = dir.join("file");
    fs::write(&file, "x").unwrap();
    std::os::unix::fs::chown(&file, Some(12), Some(34)).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o6755)).unwrap();
    let link = dir.join("link");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    std::os::unix::fs::lchown(&link, Some(56), Some(78)).unwrap();
    let times = |seconds, nanoseconds| libc::timespec {
        tv_sec: seconds,
        tv_nsec: nanoseconds,
    };
    for path in [&file, &link] {
        let both = [times(1_000_000_000, 123_456_789), times(-5, 1)];
        // SAFETY: a valid string and two times.
        ok(unsafe {
            libc::utimensat(
                libc::AT_FDCWD,
                text(path).as_ptr(),
                both.as_ptr(),
                libc::AT_SYMLINK_NOFOLLOW,
            )
        });
        let found = fs::symlink_metadata(path).unwrap();
        assert_eq!(
            (found.atime(), found.atime_nsec()),
            (1_000_000_000, 123_456_789)
        );
        assert_eq!((found.mtime(), found.mtime_nsec()), (-5, 1));
    }
    let found = fs::symlink_metadata(&file).unwrap();
    assert_eq!((found.uid(), found.gid(), mode(&file)), (12, 34, 0o6755));
    let found = fs::symlink_metadata(&link).unwrap();
    assert_eq!((found.uid(), found.gid()), (56, 78));
    // A change of the owner takes set-user-ID away.
    std::os::unix::fs::chown(&file, Some(13), None).unwrap();
    assert_eq!(mode(&file), 0o755);
    let before = fs::metadata(&file).unwrap().mtime();
    fs::write(&file, "y").unwrap();
    assert!(fs::metadata(&file).unwrap().mtime() > before);
}

pub fn extended_attributes_are_kept(dir: &Path) {
    let file = dir.join("file");
    fs::write(&file, "").unwrap();
    let link = dir.join("link");
    std::os::unix::fs::symlink("file", &link).unwrap();
    for name in ["user.a", "trusted.b", "security.c"] {
        for path in [&file, &dir.to_owned()] {
            set_xattr(path, name, b"value").unwrap();
            assert_eq!(get_xattr(path, name).unwrap(), b"value");
        }
    }
    set_xattr(&link, "trusted.l", b"of the link").unwrap();
    assert_eq!(error(get_xattr(&file, "trusted.l")), libc::ENODATA);
    assert_eq!(error(set_xattr(&link, "user.l", b"")), libc::EPERM);
    let mut names = vec![0u8; 256];
    // SAFETY: a valid string, and a buffer of this length.
    let length =
        unsafe { libc::llistxattr(text(&file).as_ptr(), names.as_mut_ptr().cast(), names.len()) };
    names.truncate(length as usize);
    let names: Vec<_> = names.split(|byte| *byte == 0).collect();
    assert!(names.contains(&&b"user.a"[..]) && names.contains(&&b"security.c"[..]));
    // SAFETY: valid strings.
    ok(unsafe { libc::removexattr(text(&file).as_ptr(), c"user.a".as_ptr()) });
    assert_eq!(error(get_xattr(&file, "user.a")), libc::ENODATA);
}

/// `struct vfs_ns_cap_data` with CAP_NET_RAW, revision 2 (include/uapi/linux/capability.h).
const CAPABILITY: [u8; 20] = [
    1, 0, 0, 2, 0, 0x20, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
];

pub fn writing_takes_capabilities_and_set_user_id_away(dir: &Path) {
    let file = dir.join("file");
    fs::write(&file, "x").unwrap();
    set_xattr(&file, "security.capability", &CAPABILITY).unwrap();
    assert_eq!(get_xattr(&file, "security.capability").unwrap(), CAPABILITY);
    fs::write(&file, "y").unwrap();
    assert_eq!(
        error(get_xattr(&file, "security.capability")),
        libc::ENODATA
    );
    fs::set_permissions(dir, Permissions::from_mode(0o777)).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o6777)).unwrap();
    let mut root = OpenOptions::new().append(true).open(&file).unwrap();
    root.write_all(b"root may").unwrap();
    assert_eq!(mode(&file), 0o6777);
    let path = file.clone();
    as_user(1000, move || {
        let mut user = OpenOptions::new().append(true).open(path).unwrap();
        user.write_all(b"others may not").unwrap();
    });
    assert_eq!(mode(&file), 0o777);
    fs::set_permissions(&file, Permissions::from_mode(0o4777)).unwrap();
    let path = file.clone();
    as_user(1000, move || drop(File::create(path).unwrap()));
    assert_eq!(mode(&file), 0o777);
}

pub fn other_users_are_kept_out(dir: &Path) {
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let (mine, theirs) = (dir.join("mine"), dir.join("theirs"));
    fs::write(&mine, "secret").unwrap();
    fs::set_permissions(&mine, Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(&theirs).unwrap();
    std::os::unix::fs::chown(&theirs, Some(1000), Some(1000)).unwrap();
    let (theirs_too, mine_too, top) = (theirs.clone(), mine.clone(), dir.to_owned());
    as_user(1000, move || {
        assert_eq!(error(fs::read(&mine_too)), libc::EACCES);
        assert_eq!(error(fs::write(top.join("new"), "")), libc::EACCES);
        assert_eq!(error(fs::remove_file(&mine_too)), libc::EACCES);
        let own = theirs_too.join("own");
        fs::write(&own, "own").unwrap();
        fs::create_dir(theirs_too.join("dir")).unwrap();
        std::os::unix::fs::symlink("x", theirs_too.join("link")).unwrap();
        assert_eq!(
            error(std::os::unix::fs::chown(&own, Some(0), None)),
            libc::EPERM
        );
    });
    for entry in ["own", "dir", "link"] {
        let found = fs::symlink_metadata(theirs.join(entry)).unwrap();
        assert_eq!((found.uid(), found.gid()), (1000, 1000));
    }
}

/// `struct posix_acl_xattr` (include/uapi/linux/posix_acl_xattr.h): entries of tag, permissions, id.
fn acl(entries: &[(u16, u16, u32)]) -> Vec<u8> {
    let mut value = 2u32.to_le_bytes().to_vec();
    for (tag, permissions, id) in entries {
        value.extend(tag.to_le_bytes());
        value.extend(permissions.to_le_bytes());
        value.extend(id.to_le_bytes());
    }
    value
}

/// The owner, user 1000, the group, the mask, others.
fn acl_for_1000() -> Vec<u8> {
    let none = u32::MAX;
    acl(&[
        (1, 6, none),
        (2, 6, 1000),
        (4, 0, none),
        (0x10, 6, none),
        (0x20, 0, none),
    ])
}

pub fn access_control_lists_hold(dir: &Path) {
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let path = dir.join("file");
    fs::write(&path, "for some").unwrap();
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    set_xattr(&path, "system.posix_acl_access", &acl_for_1000()).unwrap();
    let value = get_xattr(&path, "system.posix_acl_access").unwrap();
    assert_eq!(value, acl_for_1000());
    let again = path.clone();
    as_user(1000, move || {
        assert_eq!(fs::read(&again).unwrap(), b"for some");
        fs::write(&again, "changed").unwrap();
    });
    let again = path.clone();
    as_user(1001, move || {
        assert_eq!(error(fs::read(&again)), libc::EACCES);
    });
    // The group's bits of the mode are the mask.
    fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
    as_user(1000, move || {
        assert_eq!(error(fs::read(&path)), libc::EACCES);
    });
}

pub fn default_access_control_lists_are_inherited(dir: &Path) {
    set_xattr(dir, "system.posix_acl_default", &acl_for_1000()).unwrap();
    let path = dir.join("file");
    fs::write(&path, "").unwrap();
    let value = get_xattr(&path, "system.posix_acl_access").unwrap();
    assert!(value.ends_with(&acl(&[(0x20, 0, u32::MAX)])[4..]));
    // The list, and not the umask, says what others get.
    assert_eq!(mode(&path) & 0o007, 0);
    let plain = dir.join("..").join("plain-umask");
    fs::write(&plain, "").unwrap();
    assert_eq!(mode(&plain), 0o644);
    fs::remove_file(plain).unwrap();
}

pub fn group_directories_hand_their_group_down(dir: &Path) {
    std::os::unix::fs::chown(dir, None, Some(2000)).unwrap();
    fs::set_permissions(dir, Permissions::from_mode(0o2777)).unwrap();
    let path = dir.to_owned();
    as_user(1000, move || {
        fs::write(path.join("file"), "").unwrap();
        fs::create_dir(path.join("sub")).unwrap();
    });
    for entry in ["file", "sub"] {
        let found = fs::metadata(dir.join(entry)).unwrap();
        assert_eq!((found.uid(), found.gid()), (1000, 2000));
    }
    assert_eq!(mode(&dir.join("sub")) & 0o2000, 0o2000);
}
