//! A disk's backend on the host: a raw image file or a block device.

use std::ffi::c_int;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
#[cfg(test)]
use std::sync::Arc;
use std::sync::{Mutex, PoisonError};

use vmm_sys_util::{ioctl_io_nr, ioctl_ior_nr};

use crate::virtio::queue::{MAX_SEGMENTS, Segments};

/// What the guest counts in (virtio 1.2, section 5.2.6).
pub const SECTOR: u64 = 512;

// linux/fs.h.
ioctl_io_nr!(BLKSSZGET, 0x12, 104);
ioctl_io_nr!(BLKDISCARD, 0x12, 119);
ioctl_io_nr!(BLKZEROOUT, 0x12, 127);
ioctl_ior_nr!(BLKGETSIZE64, 0x12, 114, usize);

/// Why something cannot be a disk.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The path cannot be opened.
    #[error("Cannot open the disk {path}{}", if *.read_only { "" } else { " for writing (read_only would do without)" })]
    Open {
        /// The path.
        path: PathBuf,
        /// How it was opened.
        read_only: bool,
        /// Why it failed.
        #[source]
        source: io::Error,
    },
    /// What the descriptor is cannot be found out.
    #[error("Cannot find out the size of the disk {0}")]
    Inspect(String, #[source] io::Error),
    /// It is a directory, a FIFO, …
    #[error("The disk {0} is neither a file nor a block device")]
    Kind(String),
    /// It has no whole sectors.
    #[error("The disk {disk} has {bytes} bytes, which is not a multiple of {SECTOR} above 0")]
    Size {
        /// Which.
        disk: String,
        /// Its size.
        bytes: u64,
    },
    /// The descriptor that was handed over does not fit.
    #[error("The disk {0} is to be written to, but its descriptor is open for reading only")]
    NotWritable(String),
}

/// An open disk.
#[derive(Debug)]
pub struct Disk {
    sectors: u64,
    block_size: u32,
    read_only: bool,
    is_device: bool,
    /// The last two fields, in this order: closed first, then told.
    file: File,
    closed: Mutex<Closed>,
    /// Reads wait while it is held for writing.
    #[cfg(test)]
    pub stall: Arc<std::sync::RwLock<()>>,
}

/// Calls what it holds when it is dropped.
#[derive(Default)]
struct Closed(Option<Box<dyn FnOnce() + Send>>);

impl std::fmt::Debug for Closed {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "Closed({})", self.0.is_some())
    }
}

impl Drop for Closed {
    fn drop(&mut self) {
        if let Some(tell) = self.0.take() {
            tell();
        }
    }
}

impl Disk {
    /// Opens the file or block device at `path`.
    ///
    /// # Errors
    ///
    /// It cannot be opened so, or cannot be a disk.
    pub fn open(path: &Path, read_only: bool) -> Result<Self, DiskError> {
        // Without O_NONBLOCK, opening a FIFO by mistake would wait for its other end.
        let file = OpenOptions::new()
            .read(true)
            .write(!read_only)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)
            .map_err(|source| match source.raw_os_error() {
                // A directory cannot be opened for writing; say what it is rather.
                Some(libc::EISDIR) => DiskError::Kind(path.display().to_string()),
                _ => DiskError::Open {
                    path: path.to_owned(),
                    read_only,
                    source,
                },
            })?;
        Self::new(file, read_only, path.display().to_string())
    }

    /// The file or block device behind `fd`.
    ///
    /// # Errors
    ///
    /// It cannot be a disk, or is not open for writing although not `read_only`.
    pub fn from_fd(fd: OwnedFd, read_only: bool) -> Result<Self, DiskError> {
        Self::new(File::from(fd), read_only, "that was handed over".to_owned())
    }

    fn new(file: File, read_only: bool, name: String) -> Result<Self, DiskError> {
        let metadata = match file.metadata() {
            Ok(metadata) => metadata,
            Err(e) => return Err(DiskError::Inspect(name, e)),
        };
        let is_device = metadata.file_type().is_block_device();
        let (bytes, block_size) = if is_device {
            match device_geometry(&file) {
                Ok(geometry) => geometry,
                Err(e) => return Err(DiskError::Inspect(name, e)),
            }
        } else if metadata.is_file() {
            (metadata.len(), SECTOR as u32)
        } else {
            return Err(DiskError::Kind(name));
        };
        if bytes == 0 || bytes % SECTOR != 0 {
            return Err(DiskError::Size { disk: name, bytes });
        }
        // SAFETY: no memory is involved.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        if !read_only && flags & libc::O_ACCMODE != libc::O_RDWR {
            return Err(DiskError::NotWritable(name));
        }
        Ok(Self {
            sectors: bytes / SECTOR,
            block_size,
            read_only,
            is_device,
            file,
            closed: Mutex::default(),
            #[cfg(test)]
            stall: Arc::default(),
        })
    }

    /// Calls `tell` when the disk is closed, instead of what was to be called before.
    pub fn on_close(&self, tell: Option<Box<dyn FnOnce() + Send>>) {
        let mut closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        closed.0 = tell;
    }

    /// Its size in sectors of 512 bytes.
    pub fn sectors(&self) -> u64 {
        self.sectors
    }

    /// Its logical block size in bytes.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// Fills `segments` from `offset` bytes on, straight into guest memory.
    ///
    /// # Errors
    ///
    /// What the host says; `UnexpectedEof` when the file has become shorter.
    pub fn read(&self, segments: &mut Segments, offset: u64) -> io::Result<()> {
        #[cfg(test)]
        let _stall = self.stall.read();
        transfer(segments, offset, |iovecs, count, offset| {
            // SAFETY: the iovecs are of guest memory, see `Segments`; the guest may change it meanwhile, as
            // for any DMA.
            unsafe { libc::preadv64(self.file.as_raw_fd(), iovecs, count, offset) }
        })
    }

    /// Writes `segments` from `offset` bytes on, straight from guest memory.
    ///
    /// # Errors
    ///
    /// What the host says.
    pub fn write(&self, segments: &mut Segments, offset: u64) -> io::Result<()> {
        transfer(segments, offset, |iovecs, count, offset| {
            // SAFETY: see `read`.
            unsafe { libc::pwritev64(self.file.as_raw_fd(), iovecs, count, offset) }
        })
    }

    /// Waits until what was written is on stable storage.
    ///
    /// # Errors
    ///
    /// What the host says.
    pub fn flush(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    /// Gives the space of `len` bytes from `offset` on back; what is read there later is undefined for a
    /// device, and zero for a file.
    ///
    /// # Errors
    ///
    /// What the host says; `Unsupported` when it cannot.
    pub fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        match self.is_device {
            true => self.range_ioctl(BLKDISCARD(), offset, len),
            false => self.fallocate(libc::FALLOC_FL_PUNCH_HOLE, offset, len),
        }
    }

    /// Makes `len` bytes from `offset` on zero; their space may be given back if `unmap`.
    ///
    /// # Errors
    ///
    /// What the host says; `Unsupported` when it has no way but writing zeroes, which the guest can do itself.
    pub fn write_zeroes(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        match (self.is_device, unmap) {
            (true, _) => self.range_ioctl(BLKZEROOUT(), offset, len),
            (false, true) => self.fallocate(libc::FALLOC_FL_PUNCH_HOLE, offset, len),
            (false, false) => self.fallocate(libc::FALLOC_FL_ZERO_RANGE, offset, len),
        }
    }

    fn fallocate(&self, mode: c_int, offset: u64, len: u64) -> io::Result<()> {
        let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let offset = i64::try_from(offset).map_err(invalid)?;
        let len = i64::try_from(len).map_err(invalid)?;
        let mode = mode | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: no memory is involved.
        let result = unsafe { libc::fallocate64(self.file.as_raw_fd(), mode, offset, len) };
        check(result)
    }

    fn range_ioctl(&self, request: u64, offset: u64, len: u64) -> io::Result<()> {
        let range = [offset, len];
        // SAFETY: both ioctls read two u64 (block/ioctl.c).
        let result = unsafe { libc::ioctl(self.file.as_raw_fd(), request as _, range.as_ptr()) };
        check(result)
    }
}

/// Size in bytes and logical block size of a block device.
fn device_geometry(file: &File) -> io::Result<(u64, u32)> {
    let mut bytes = 0u64;
    // SAFETY: the ioctl writes one u64 (block/ioctl.c).
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKGETSIZE64() as _, &raw mut bytes) })?;
    let mut block_size: c_int = 0;
    // SAFETY: the ioctl writes one int (block/ioctl.c).
    check(unsafe { libc::ioctl(file.as_raw_fd(), BLKSSZGET() as _, &raw mut block_size) })?;
    Ok((bytes, u32::try_from(block_size).unwrap_or(SECTOR as u32)))
}

fn check(result: c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Calls a vectored system call until all of `segments` is through.
fn transfer(
    segments: &mut Segments,
    mut offset: u64,
    call: impl Fn(*const libc::iovec, c_int, i64) -> isize,
) -> io::Result<()> {
    while !segments.is_empty() {
        let position =
            i64::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let iovecs = segments.iovecs();
        let count = iovecs.len().min(MAX_SEGMENTS) as c_int;
        match call(iovecs.as_ptr(), count, position) {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            done @ 1.. => {
                segments.advance(done as usize);
                offset += done as u64;
            }
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(path: &Path, read_only: bool) -> String {
        Disk::open(path, read_only).unwrap_err().to_string()
    }

    #[test]
    fn what_cannot_be_a_disk_is_refused_with_its_name() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing");
        assert!(refused(&missing, true).contains("missing"));
        for read_only in [true, false] {
            let error = refused(dir.path(), read_only);
            assert!(
                error.ends_with("is neither a file nor a block device"),
                "{error}"
            );
        }
        assert!(refused(Path::new("/dev/zero"), true).contains("neither a file nor"));
        let odd = dir.path().join("odd");
        for bytes in [0, 511, 513] {
            File::create(&odd).unwrap().set_len(bytes).unwrap();
            assert!(refused(&odd, false).contains(&format!("has {bytes} bytes")));
        }
    }

    #[test]
    fn a_descriptor_for_reading_is_no_disk_to_write_to() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        File::create(&path).unwrap().set_len(1024).unwrap();
        let open = || OwnedFd::from(File::open(&path).unwrap());
        assert!(matches!(
            Disk::from_fd(open(), false),
            Err(DiskError::NotWritable(_))
        ));
        assert_eq!(Disk::from_fd(open(), true).unwrap().sectors(), 2);
    }
}
