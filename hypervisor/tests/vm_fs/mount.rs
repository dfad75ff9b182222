//! What is mounted on the host while a test runs.

use std::ffi::CString;
use std::io;
use std::path::Path;

/// A mount, until dropped.
pub struct Mount(CString);

impl Mount {
    fn new(source: &str, target: &Path, kind: &str, flags: u64, data: &str) -> Self {
        let text = |text: &str| CString::new(text).unwrap();
        let point = text(target.to_str().unwrap());
        // SAFETY: all are valid strings.
        let done = unsafe {
            libc::mount(
                text(source).as_ptr(),
                point.as_ptr(),
                text(kind).as_ptr(),
                flags,
                text(data).as_ptr().cast(),
            )
        };
        assert_eq!(done, 0, "{target:?}: {}", io::Error::last_os_error());
        Self(point)
    }

    /// An overlay of the layers in `directory`.
    pub fn overlay(directory: &Path, target: &Path) -> Self {
        let at = |name: &str| directory.join(name).display().to_string();
        let data = format!(
            "lowerdir={},upperdir={},workdir={}",
            at("lower"),
            at("upper"),
            at("work")
        );
        Self::new("overlay", target, "overlay", 0, &data)
    }

    /// An empty file system.
    pub fn tmpfs(target: &Path) -> Self {
        Self::new("tmpfs", target, "tmpfs", 0, "")
    }

    /// `source` at `target`.
    pub fn bind(source: &Path, target: &Path) -> Self {
        Self::new(source.to_str().unwrap(), target, "", libc::MS_BIND, "")
    }

    /// Unmounts, which fails while it is in use.
    pub fn end(self) -> io::Result<()> {
        // SAFETY: a valid string.
        match unsafe { libc::umount2(self.0.as_ptr(), 0) } {
            0 => {
                std::mem::forget(self);
                Ok(())
            }
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // SAFETY: a valid string.
        unsafe { libc::umount2(self.0.as_ptr(), libc::MNT_DETACH) };
    }
}
