//! Guest memory and the map of guest-physical addresses.
//!
//! ```text
//! 0x0000_0000  RAM; the first MiB holds what boot hands over (see the constants below)
//! 0xd000_0000  virtio-mmio windows, 4 KiB each
//! 0xfec0_0000  IOAPIC
//! 0xfee0_0000  local APICs (KVM)
//! 0xfffb_d000  three pages that KVM on Intel wants for itself
//! 0x1_0000_0000  RAM that did not fit below the gap
//! ```

use std::io;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use vm_memory::bitmap::BitmapSlice;
use vm_memory::mmap::MmapRegionError;
use vm_memory::{
    Bytes, GuestAddress, GuestMemory, GuestRegionCollection, GuestRegionMmap, MmapRegion,
    VolatileSlice,
};

use crate::virtio::Memory;

/// Where PVH boot's `hvm_start_info` lies.
pub const START_INFO: u64 = 0x6000;
/// Where the memory map for PVH boot lies.
pub const MEMORY_MAP: u64 = 0x7000;
/// Where the kernel's command line lies.
pub const CMDLINE: u64 = 0x2_0000;
/// The longest command line, its final zero included: `COMMAND_LINE_SIZE` of Linux on x86.
pub const CMDLINE_MAX: usize = 2048;
/// The last KiB of base memory, where Linux looks for the MP floating pointer (Intel MP 1.4, section 4).
pub const MP_TABLE: u64 = 0x9_fc00;
/// End of the hole that a PC has below 1 MiB.
pub const HIGH_MEMORY: u64 = 0x10_0000;
/// Start of the gap below 4 GiB that is no RAM, and of the first virtio-mmio window.
pub const GAP_START: u64 = 0xd000_0000;
/// End of the gap.
pub const GAP_END: u64 = 0x1_0000_0000;
/// The IOAPIC's registers.
pub const IOAPIC: u64 = 0xfec0_0000;
/// The local APICs' registers.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// Three pages for KVM's task state segment (`KVM_SET_TSS_ADDR`).
pub const KVM_TSS: u64 = 0xfffb_d000;

/// The size of a huge page: guest memory is aligned to it, so that one fault maps as much.
const HUGE_PAGE: usize = 2 << 20;

/// The most guest memory, in MiB: 1 TiB, which every processor with KVM can address.
const MAX_MIB: u64 = 1 << 20;

/// The most memory of a small machine, in MiB. A larger one's kernel fills whole huge pages with what it notes of each page.
pub const SMALL_MIB: u64 = 512;

/// Why guest memory cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// No memory, or more than a guest can address.
    #[error("The machine cannot have {0} MiB of memory: set memory_mib to 1 to {MAX_MIB}")]
    Size(u64),
    /// The host refused the mapping.
    #[error("Cannot map {0} MiB of guest memory: lower memory_mib or raise the host's limits")]
    Map(u64, #[source] io::Error),
    /// vm-memory refused a region.
    #[error("Cannot use the mapped guest memory")]
    Region(#[source] MmapRegionError),
    /// vm-memory refused the regions together.
    #[error("Cannot put guest memory together")]
    Layout(#[source] vm_memory::GuestRegionCollectionError),
}

impl MemoryError {
    /// Whether the configuration is to blame, and not the host.
    pub fn is_configuration(&self) -> bool {
        matches!(self, Self::Size(_))
    }
}

/// The ranges of RAM, `(start, length)` in bytes, for a machine of `size` bytes: one below the
/// gap and, if that is not enough, one above.
pub fn ram_ranges(size: u64) -> impl Iterator<Item = (u64, u64)> {
    let low = size.min(GAP_START);
    let high = size - low;
    [(0, low), (GAP_END, high)]
        .into_iter()
        .filter(|(_, length)| *length > 0)
}

/// Maps `mib` MiB of zeroed memory for the guest. It stays mapped until the process ends.
pub fn allocate(mib: u64) -> Result<Memory, MemoryError> {
    if mib == 0 || mib > MAX_MIB {
        return Err(MemoryError::Size(mib));
    }
    let size = (mib << 20) as usize;
    let base = map_aligned(size).map_err(|e| MemoryError::Map(mib, e))?;
    let mut offset = 0;
    let mut regions = Vec::with_capacity(2);
    for (start, length) in ram_ranges(size as u64) {
        let length = length as usize;
        // SAFETY: The ranges' lengths add up to `size`, which is what `map_aligned` mapped at `base`; nobody unmaps it.
        let region = unsafe {
            MmapRegion::build_raw(
                base.wrapping_add(offset),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            )
        }
        .map_err(MemoryError::Region)?;
        offset += length;
        // `None` only for a region that reaches beyond the last address: MAX_MIB is far below.
        regions.extend(GuestRegionMmap::new(region, GuestAddress(start)).map(Arc::new));
    }
    GuestRegionCollection::from_arc_regions(regions).map_err(MemoryError::Layout)
}

/// Maps `size` bytes at a multiple of the huge page size, which `mmap` by itself does not do
/// before Linux 6.7.
fn map_aligned(size: usize) -> io::Result<*mut u8> {
    let reserved = size
        .checked_add(HUGE_PAGE)
        .ok_or(io::ErrorKind::OutOfMemory)?;
    // SAFETY: A new private mapping at an address of the kernel's choice touches no memory in use.
    let start = unsafe {
        libc::mmap(
            null_mut(),
            reserved,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    if start == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let start = start.cast::<u8>();
    Ok(start.wrapping_add(start.align_offset(HUGE_PAGE)))
}

/// Until [`note_request`] guest memory comes in small pages, but for what [`back_with_huge_pages`] gets. Of most huge pages
/// a part only is touched while a small machine boots: clearing the rest is work, and memory, that nobody uses. And Debian's
/// kernels clear a huge page twice (`CONFIG_INIT_ON_ALLOC_DEFAULT_ON`).
pub fn use_small_pages_until_first_request() {
    SMALL_PAGES.store(true, Ordering::Relaxed);
    set_huge_pages_disabled(true);
}

/// The guest has asked a device for something, not merely given it buffers to fill: its kernel is up. From here on guest
/// memory comes in pages as the host's administrator has chosen.
pub fn note_request() {
    static FIRST: Once = Once::new();
    FIRST.call_once(|| {
        if SMALL_PAGES.load(Ordering::Relaxed) {
            set_huge_pages_disabled(false);
        }
    });
}

/// Whether memory comes in small pages until the first request.
static SMALL_PAGES: AtomicBool = AtomicBool::new(false);

fn set_huge_pages_disabled(disabled: bool) {
    // SAFETY: The call takes integers only. Where the kernel has no huge pages it fails, to no harm.
    unsafe {
        libc::prctl(
            libc::PR_SET_THP_DISABLE,
            libc::c_ulong::from(disabled),
            0,
            0,
            0,
        )
    };
}

/// Gets those huge pages of guest memory that lie wholly within a range, before anything is written there. Before the guest
/// runs, that is: then nobody else gets pages meanwhile.
pub fn back_with_huge_pages(range: &VolatileSlice<'_, impl BitmapSlice>) {
    let guard = range.ptr_guard_mut();
    let skipped = guard.as_ptr().align_offset(HUGE_PAGE);
    let length = range.len().saturating_sub(skipped) & !(HUGE_PAGE - 1);
    if length == 0 {
        return;
    }
    let small = SMALL_PAGES.load(Ordering::Relaxed);
    if small {
        set_huge_pages_disabled(false);
    }
    let first = guard.as_ptr().wrapping_add(skipped);
    // SAFETY: The range lies within guest memory. The call is advice: where the host has no huge pages it fails, to no harm.
    unsafe { libc::madvise(first.cast(), length, libc::MADV_HUGEPAGE) };
    for page in (skipped..skipped + length).step_by(HUGE_PAGE) {
        // It cannot fail: the byte lies within the range.
        let _ = range.write_obj(0u8, page);
    }
    if small {
        set_huge_pages_disabled(true);
    }
}

/// Gets the top of memory as huge pages, before the guest asks for it page by page: Linux takes from the top down what it
/// fills at boot, 64 bytes for each page of memory, its hash tables and page tables (`mm/memblock.c`), which
/// were 6 MiB, whole, of a machine with 256 (by KVM's tracepoint `kvm_page_fault`).
pub fn back_top_with_huge_pages(memory: &Memory, mib: u64) {
    let length = ((mib / 64 + 4) << 20).min(mib << 20);
    // What lies beyond the gap is only the top of a machine that is not small.
    let start = (mib << 20).min(GAP_START).saturating_sub(length) & !(HUGE_PAGE as u64 - 1);
    for slice in memory
        .get_slices(GuestAddress(start), length as usize)
        .flatten()
    {
        back_with_huge_pages(&slice);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use vm_memory::GuestMemoryRegion;

    use super::*;

    #[test]
    fn memory_up_to_the_gap_is_one_range() {
        assert_eq!(
            ram_ranges(GAP_START).collect::<Vec<_>>(),
            [(0, 0xd000_0000)]
        );
    }

    #[test]
    fn memory_beyond_the_gap_continues_at_4_gib() {
        assert_eq!(
            ram_ranges(4 << 30).collect::<Vec<_>>(),
            [(0, 0xd000_0000), (0x1_0000_0000, 0x3000_0000)]
        );
    }

    proptest! {
        #[test]
        fn ranges_add_up_and_leave_the_gap_free(mib in 1u64..=MAX_MIB) {
            let ranges: Vec<_> = ram_ranges(mib << 20).collect();
            prop_assert_eq!(ranges.iter().map(|(_, length)| length).sum::<u64>(), mib << 20);
            for (start, length) in ranges {
                prop_assert!(start + length <= GAP_START || start >= GAP_END);
            }
        }
    }

    #[test]
    fn no_memory_and_too_much_are_the_configurations_fault() {
        for mib in [0, MAX_MIB + 1, u64::MAX] {
            assert!(allocate(mib).unwrap_err().is_configuration());
        }
    }

    #[test]
    fn allocated_memory_is_zero_and_aligned_on_both_sides_of_the_gap() {
        let memory = allocate(3329).unwrap();
        assert_eq!(memory.num_regions(), 2);
        for region in memory.iter() {
            assert_eq!(region.as_ptr().align_offset(HUGE_PAGE), 0);
        }
        let last = GuestAddress(GAP_END + (1 << 20) - 8);
        assert_eq!(memory.read_obj::<u64>(last).unwrap(), 0);
        assert!(memory.read_obj::<u64>(GuestAddress(GAP_START)).is_err());
        assert_eq!(memory.iter().map(|r| r.len()).sum::<u64>(), 3329 << 20);
    }
}
