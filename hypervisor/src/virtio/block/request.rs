//! One block request (virtio 1.2, section 5.2.6): a header of 16 bytes, data in one direction, a status byte.

use std::io;

use super::disk::{Disk, SECTOR};
use crate::virtio::queue::Buffers;

// virtio 1.2, section 5.2.6.
const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;

const STATUS_OK: u8 = 0;
const STATUS_IOERR: u8 = 1;
const STATUS_UNSUPP: u8 = 2;

/// `WRITE_ZEROES`: the space may be given back.
const FLAG_UNMAP: u32 = 1;

/// Bytes of a serial number.
pub const ID_LEN: usize = 20;

/// The most sectors of one range to discard or to zero: 2 GiB.
pub const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// The most ranges of one such request.
pub const MAX_RANGES: u32 = 16;

/// A request that fails.
#[derive(Debug)]
pub enum Failure {
    /// The driver asks for what is wrong or the host cannot do it.
    Error(Option<io::Error>),
    /// The driver asks for what this device does not do.
    Unsupported,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY) => Self::Unsupported,
            _ => Self::Error(Some(error)),
        }
    }
}

/// The driver's request is malformed or out of bounds.
const WRONG: Failure = Failure::Error(None);

/// What requests are carried out on.
pub struct Target<'a> {
    /// The disk; a slot that has none yet fails whatever needs one.
    pub disk: Option<&'a Disk>,
    /// The serial number.
    pub id: &'a [u8; ID_LEN],
    /// Whether the driver did not accept `VIRTIO_BLK_F_FLUSH`, so that each write has to be stable when it completes.
    pub write_through: bool,
}

impl Target<'_> {
    /// Carries the request in `buffers` out and writes its status. Returns the bytes written, and
    /// the host's error if there was one.
    pub fn serve(&self, buffers: &mut Buffers) -> (u32, Option<io::Error>) {
        // Without a place for a status there is nothing to be done, and nobody to be told.
        if !buffers.writable.reserve_last_byte() {
            return (0, None);
        }
        let (status, written, error) = match self.execute(buffers) {
            Ok(written) => (STATUS_OK, written, None),
            Err(Failure::Error(error)) => (STATUS_IOERR, 0, error),
            Err(Failure::Unsupported) => (STATUS_UNSUPP, 0, None),
        };
        buffers.writable.set_reserved_byte(status);
        (written.saturating_add(1), error)
    }

    /// Returns how many bytes of data were written to the guest.
    fn execute(&self, buffers: &mut Buffers) -> Result<u32, Failure> {
        let header: [u8; 16] = buffers.readable.read_array().ok_or(WRONG)?;
        let [kind, _, sector_low, sector_high] = words(&header);
        let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
        match kind {
            TYPE_IN => self.read(buffers, sector),
            TYPE_OUT => self.write(buffers, sector),
            TYPE_FLUSH => self
                .disk
                .map_or(Ok(0), |disk| Ok(disk.flush().map(|()| 0)?)),
            TYPE_GET_ID => match buffers.writable.write(self.id) {
                ID_LEN => Ok(ID_LEN as u32),
                _ => Err(WRONG),
            },
            TYPE_DISCARD | TYPE_WRITE_ZEROES => self.ranges(buffers, kind),
            _ => Err(Failure::Unsupported),
        }
    }

    fn read(&self, buffers: &mut Buffers, sector: u64) -> Result<u32, Failure> {
        let disk = self.disk.ok_or(WRONG)?;
        let len = buffers.writable.len();
        let offset = checked_offset(disk, sector, len as u64)?;
        disk.read(&mut buffers.writable, offset)?;
        u32::try_from(len).map_err(|_| WRONG)
    }

    fn write(&self, buffers: &mut Buffers, sector: u64) -> Result<u32, Failure> {
        let disk = self.writable_disk()?;
        let offset = checked_offset(disk, sector, buffers.readable.len() as u64)?;
        disk.write(&mut buffers.readable, offset)?;
        if self.write_through {
            disk.flush()?;
        }
        Ok(0)
    }

    fn ranges(&self, buffers: &mut Buffers, kind: u32) -> Result<u32, Failure> {
        let disk = self.writable_disk()?;
        let len = buffers.readable.len();
        if len == 0 || !len.is_multiple_of(16) || len / 16 > MAX_RANGES as usize {
            return Err(WRONG);
        }
        while let Some(range) = buffers.readable.read_array::<16>() {
            let [sector_low, sector_high, sectors, flags] = words(&range);
            let sector = u64::from(sector_high) << 32 | u64::from(sector_low);
            let unmap = flags & FLAG_UNMAP != 0;
            // Section 5.2.6.2: unknown flags, and unmapping while discarding, are not supported.
            if flags & !FLAG_UNMAP != 0 || (kind == TYPE_DISCARD && unmap) {
                return Err(Failure::Unsupported);
            }
            if sectors > MAX_RANGE_SECTORS {
                return Err(WRONG);
            }
            let len = u64::from(sectors) * SECTOR;
            let offset = checked_offset(disk, sector, len)?;
            match kind {
                // The host takes no empty range, the guest may give one.
                _ if len == 0 => {}
                TYPE_DISCARD => disk.discard(offset, len)?,
                _ => disk.write_zeroes(offset, len, unmap)?,
            }
        }
        if self.write_through {
            disk.flush()?;
        }
        Ok(0)
    }

    fn writable_disk(&self) -> Result<&Disk, Failure> {
        self.disk.filter(|disk| !disk.read_only()).ok_or(WRONG)
    }
}

/// The offset in bytes of `len` bytes from `sector` on, if they are whole sectors of the disk.
fn checked_offset(disk: &Disk, sector: u64, len: u64) -> Result<u64, Failure> {
    if !len.is_multiple_of(SECTOR) {
        return Err(WRONG);
    }
    let end = sector.checked_add(len / SECTOR).ok_or(WRONG)?;
    if end > disk.sectors() {
        return Err(WRONG);
    }
    Ok(sector * SECTOR)
}

/// Four little-endian words.
fn words(bytes: &[u8; 16]) -> [u32; 4] {
    let mut words = [0; 4];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = chunk
            .iter()
            .rev()
            .fold(0, |value, byte| value << 8 | u32::from(*byte));
    }
    words
}
