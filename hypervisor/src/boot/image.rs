//! Files on their way into guest memory: kernel and initramfs.
//!
//! They are mapped, not read, and copied past the caches: they are megabytes that the hypervisor
//! does not look at again.

use std::arch::x86_64::{__m256i, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};

use vm_memory::bitmap::BitmapSlice;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{
    FileOffset, MmapRegion, ReadVolatile, VolatileMemory, VolatileMemoryError, VolatileSlice,
};

use crate::memory::back_with_huge_pages;

/// A file that is read from guest memory's side. Whoever truncates it meanwhile ends the process (SIGBUS).
pub struct Image {
    map: MmapRegion,
    position: usize,
    is_short: bool,
}

impl Image {
    /// Maps the first `size` bytes of `file`, at least one.
    pub fn map(file: File, size: usize) -> Result<Self, MmapRegionError> {
        let map = MmapRegion::build(
            Some(FileOffset::new(file, 0)),
            size,
            libc::PROT_READ,
            libc::MAP_PRIVATE,
        )?;
        Ok(Self {
            map,
            position: 0,
            is_short: false,
        })
    }

    /// Whether more was asked for than the file has.
    pub fn is_short(&self) -> bool {
        self.is_short
    }

    /// What is left from the present position on, at most `most` bytes.
    fn take(&mut self, most: usize) -> Result<VolatileSlice<'_>, VolatileMemoryError> {
        let start = self.position.min(self.map.size());
        let length = most.min(self.map.size() - start);
        self.position = start + length;
        self.is_short |= length < most;
        self.map.get_slice(start, length)
    }
}

impl Read for Image {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let slice = self.take(buffer.len()).map_err(io::Error::other)?;
        Ok(slice.copy_to(buffer))
    }
}

impl Seek for Image {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let (base, offset) = match to {
            SeekFrom::Start(position) => (0, i128::from(position)),
            SeekFrom::End(offset) => (self.map.size(), offset.into()),
            SeekFrom::Current(offset) => (self.position, offset.into()),
        };
        // A position beyond the end is one where nothing is left.
        let position = usize::try_from(base as i128 + offset)
            .map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        self.position = position;
        Ok(position as u64)
    }
}

impl ReadVolatile for Image {
    fn read_volatile<B: BitmapSlice>(
        &mut self,
        buffer: &mut VolatileSlice<'_, B>,
    ) -> Result<usize, VolatileMemoryError> {
        back_with_huge_pages(buffer);
        let slice = self.take(buffer.len())?;
        let length = slice.len();
        let (from, to) = (slice.ptr_guard(), buffer.ptr_guard_mut());
        // SAFETY: Both ranges are mapped, at least `length` bytes long, and of different mappings.
        unsafe { copy(from.as_ptr(), to.as_ptr(), length) };
        buffer.bitmap().mark_dirty(0, length);
        Ok(length)
    }
}

/// Copies `length` bytes.
///
/// # Safety
///
/// Both ranges must be valid and must not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, length: usize) {
    let head = to.align_offset(size_of::<__m256i>()).min(length);
    if !std::is_x86_feature_detected!("avx2") {
        // SAFETY: The caller's promise.
        return unsafe { from.copy_to_nonoverlapping(to, length) };
    }
    let blocks = (length - head) / size_of::<__m256i>();
    let tail = head + blocks * size_of::<__m256i>();
    // SAFETY: The three parts lie within the ranges; the middle one starts at an aligned destination, and the processor has AVX2.
    unsafe {
        from.copy_to_nonoverlapping(to, head);
        stream(from.add(head).cast(), to.add(head).cast(), blocks);
        from.add(tail)
            .copy_to_nonoverlapping(to.add(tail), length - tail);
    }
}

/// Copies 32 bytes at a time past the caches.
///
/// # Safety
///
/// As for [`copy`]; `to` must be aligned.
#[target_feature(enable = "avx2")]
unsafe fn stream(from: *const __m256i, to: *mut __m256i, blocks: usize) {
    for i in 0..blocks {
        // SAFETY: The caller's promise.
        unsafe { _mm256_stream_si256(to.add(i), _mm256_loadu_si256(from.add(i))) };
    }
    // Such stores are ordered with nothing that follows, such as the vCPU's start.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};

    use super::*;
    use crate::virtio::Memory;

    fn image(content: &[u8]) -> Image {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(content).unwrap();
        Image::map(file, content.len()).unwrap()
    }

    proptest! {
        #[test]
        fn any_part_arrives_anywhere(content in prop::collection::vec(any::<u8>(), 1..5000), skip in 0usize..300, at in 0u64..100) {
            let memory = Memory::from_ranges(&[(GuestAddress(0), 0x4000)]).unwrap();
            let skip = skip.min(content.len());
            let rest = &content[skip..];
            let mut image = image(&content);
            image.seek(SeekFrom::Start(skip as u64)).unwrap();
            memory.read_exact_volatile_from(GuestAddress(at), &mut image, rest.len()).unwrap();
            let mut got = vec![0; rest.len()];
            memory.read_slice(&mut got, GuestAddress(at)).unwrap();
            prop_assert_eq!(&got, rest);
            prop_assert_eq!(image.read(&mut [0; 8]).unwrap(), 0);
        }
    }

    #[test]
    fn an_image_that_ends_early_is_an_error() {
        let memory = Memory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let mut image = image(b"short");
        assert!(
            memory
                .read_exact_volatile_from(GuestAddress(0), &mut image, 6)
                .is_err()
        );
        image.seek(SeekFrom::End(10)).unwrap();
        assert_eq!(image.read(&mut [0; 8]).unwrap(), 0);
        assert!(image.seek(SeekFrom::Current(-100)).is_err());
    }
}
