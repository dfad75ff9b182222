//! What a file system promises to those who use it. Each check has an empty directory; it passes on the
//! host's ext4 as well (`vm_fs --here DIRECTORY`).

mod attributes;
mod contents;
mod many;
mod names;

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;

type Check = fn(&Path);

macro_rules! checks {
    ($($file:ident :: $name:ident),* $(,)?) => {
        /// All of them, by name.
        pub const CHECKS: &[(&str, Check)] = &[$((stringify!($name), $file::$name)),*];
    };
}

checks![
    attributes::owners_modes_and_times_are_kept,
    attributes::extended_attributes_are_kept,
    attributes::writing_takes_capabilities_and_set_user_id_away,
    names::links_are_what_they_are,
    names::a_rename_replaces_an_open_file,
    names::a_file_without_a_name_works_on,
    contents::holes_and_allocation_work,
    contents::shared_mappings_are_one_memory,
    contents::locks_exclude_others,
    names::fifos_and_sockets_connect,
    names::device_nodes_work,
    contents::appends_do_not_overwrite,
    contents::direct_and_synchronous_writes_work,
    contents::ranges_are_copied,
    many::a_thousand_small_files,
    many::two_thousand_files_are_open_at_once,
    attributes::other_users_are_kept_out,
    attributes::access_control_lists_hold,
    attributes::default_access_control_lists_are_inherited,
    attributes::group_directories_hand_their_group_down,
    names::programs_run_from_here,
    contents::file_system_sizes_are_told,
    names::deep_trees_and_long_names_work,
    many::many_threads_write_their_own_files,
];

fn ok(result: libc::c_int) -> libc::c_int {
    assert!(result >= 0, "{}", io::Error::last_os_error());
    result
}

fn text(path: impl AsRef<Path>) -> CString {
    CString::new(path.as_ref().to_str().unwrap()).unwrap()
}

fn error<T>(result: io::Result<T>) -> i32 {
    result.err().expect("an error").raw_os_error().unwrap()
}

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().mode() & 0o7777
}

/// Runs `work` as an ordinary user.
fn as_user(id: u32, work: impl FnOnce() + Send + 'static) {
    let done = thread::spawn(move || {
        // SAFETY: the system calls change this thread alone, which ends after the work.
        unsafe {
            assert_eq!(libc::syscall(libc::SYS_setgroups, 0, 0), 0);
            assert_eq!(libc::syscall(libc::SYS_setresgid, id, id, id), 0);
            assert_eq!(libc::syscall(libc::SYS_setresuid, id, id, id), 0);
        }
        work();
    });
    if let Err(panic) = done.join() {
        std::panic::resume_unwind(panic);
    }
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) -> io::Result<()> {
    let (path, name) = (text(path), CString::new(name).unwrap());
    // SAFETY: valid strings, and a buffer of this length.
    let done = unsafe {
        libc::lsetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_ptr().cast(),
            value.len(),
            0,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn get_xattr(path: &Path, name: &str) -> io::Result<Vec<u8>> {
    let (path, name) = (text(path), CString::new(name).unwrap());
    let mut value = vec![0; 256];
    // SAFETY: valid strings, and a buffer of this length.
    let length = unsafe {
        libc::lgetxattr(
            path.as_ptr(),
            name.as_ptr(),
            value.as_mut_ptr().cast(),
            value.len(),
        )
    };
    if length < 0 {
        return Err(io::Error::last_os_error());
    }
    value.truncate(length as usize);
    Ok(value)
}
