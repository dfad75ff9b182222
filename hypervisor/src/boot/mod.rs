//! What lies in guest memory when the first vCPU starts: the kernel, its initramfs, its command
//! line and the tables that describe the machine.
//!
//! Boot is by PVH (Xen's `docs/misc/pvh.pandoc`): the vCPU starts in 32-bit protected mode without
//! paging at the entry point that an ELF note names, with the address of `hvm_start_info` in EBX.

mod image;
pub mod mp_table;

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use image::Image;
use linux_loader::loader::elf::{self, Elf, PvhBootCapability};
use linux_loader::loader::{Error as LoaderError, KernelLoader};
use linux_loader::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use vm_memory::mmap::MmapRegionError;
use vm_memory::{
    ByteValued, Bytes, GuestAddress, GuestMemory, GuestMemoryError, GuestMemoryRegion,
};

use crate::memory::{
    CMDLINE, CMDLINE_MAX, HIGH_MEMORY, MEMORY_MAP, MP_TABLE, START_INFO, ram_ranges,
};
use crate::virtio::Memory;

/// `XEN_HVM_START_MAGIC_VALUE`.
const START_MAGIC: u32 = 0x336e_c578;
/// `XEN_HVM_MEMMAP_TYPE_RAM`.
const MEMMAP_RAM: u32 = 1;
/// `XEN_HVM_MEMMAP_TYPE_RESERVED`.
const MEMMAP_RESERVED: u32 = 2;
const PAGE: u64 = 4096;

/// Why the guest cannot be loaded. All of these are the configuration's fault.
#[derive(Debug, thiserror::Error)]
pub enum BootError {
    /// A file cannot be opened.
    #[error("Cannot open {what} {}: check the path", path.display())]
    Open {
        /// Kernel or initramfs.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: io::Error,
    },
    /// The path is a directory, a device or the like.
    #[error("The {what} {} is not a regular file: check the path", path.display())]
    NotAFile {
        /// Kernel or initramfs.
        what: &'static str,
        /// Its path.
        path: PathBuf,
    },
    /// Nothing is in the file.
    #[error("The {what} {} is empty: copy or build it again", path.display())]
    Empty {
        /// Kernel or initramfs.
        what: &'static str,
        /// Its path.
        path: PathBuf,
    },
    /// A file cannot be read.
    #[error("Cannot map {what} {}", path.display())]
    Map {
        /// Kernel or initramfs.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: MmapRegionError,
    },
    /// A file does not arrive in memory whole.
    #[error("Cannot copy {what} {} into guest memory", path.display())]
    Copy {
        /// Kernel or initramfs.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Where it stopped.
        #[source]
        source: GuestMemoryError,
    },
    /// The kernel is something else.
    #[error(
        "The kernel {} is not an x86-64 ELF image: give the uncompressed vmlinux, not a bzImage",
        .0.display()
    )]
    NotElf(PathBuf),
    /// The kernel is an ELF image that ends too early or contradicts itself.
    #[error("The kernel {} is a damaged ELF image: copy or build it again", path.display())]
    Damaged {
        /// Its path.
        path: PathBuf,
        /// What the loader met.
        #[source]
        source: LoaderError,
    },
    /// The kernel cannot be entered.
    #[error("The kernel {} has no PVH entry note: build it with CONFIG_PVH=y", .0.display())]
    NoPvh(PathBuf),
    /// The kernel's segments do not fit.
    #[error("The kernel {} does not fit into {memory_mib} MiB of memory: raise memory_mib", path.display())]
    KernelTooLarge {
        /// Its path.
        path: PathBuf,
        /// The guest's memory.
        memory_mib: u64,
    },
    /// The initramfs does not fit beside the kernel.
    #[error(
        "The initramfs {} of {size} bytes does not fit beside the kernel into {memory_mib} MiB of memory: raise memory_mib",
        path.display()
    )]
    InitramfsTooLarge {
        /// Its path.
        path: PathBuf,
        /// Its size.
        size: u64,
        /// The guest's memory.
        memory_mib: u64,
    },
    /// The command line is too long for Linux.
    #[error(
        "The kernel command line has {0} bytes with what describes the devices: at most {max} are possible",
        max = CMDLINE_MAX - 1
    )]
    CmdlineTooLong(usize),
    /// The command line would end early.
    #[error("The kernel command line contains a zero byte: remove it")]
    CmdlineZero,
    /// A table does not fit into the first MiB.
    #[error("Cannot write {0} into guest memory: raise memory_mib")]
    Table(&'static str, #[source] GuestMemoryError),
}

/// Where the guest starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The first instruction.
    pub address: u64,
}

/// Puts kernel, initramfs and command line into memory, and the start info that names them.
/// Returns the kernel's entry point.
pub fn load(
    memory: &Memory,
    kernel: &Path,
    initramfs: Option<&Path>,
    cmdline: &str,
) -> Result<Entry, BootError> {
    let (entry, kernel_end) = load_kernel(memory, kernel)?;
    let module = initramfs
        .map(|path| load_initramfs(memory, path, kernel_end))
        .transpose()?;
    write_cmdline(memory, cmdline)?;
    write_start_info(memory, module)?;
    Ok(entry)
}

/// Copies the kernel's segments to their physical addresses. Returns the PVH entry point and the
/// end of the last segment.
fn load_kernel(memory: &Memory, path: &Path) -> Result<(Entry, u64), BootError> {
    let (mut image, _) = open("kernel", path)?;
    let loaded = Elf::load(memory, None, &mut image, None).map_err(|e| match e {
        LoaderError::Elf(
            elf::Error::InvalidElfMagicNumber
            | elf::Error::BigEndianElfOnLittle
            | elf::Error::InvalidProgramHeaderSize
            | elf::Error::ReadElfHeader,
        ) => BootError::NotElf(path.to_owned()),
        LoaderError::Elf(elf::Error::ReadKernelImage) if !image.is_short() => {
            BootError::KernelTooLarge {
                path: path.to_owned(),
                memory_mib: mib(memory),
            }
        }
        source => BootError::Damaged {
            path: path.to_owned(),
            source,
        },
    })?;
    let PvhBootCapability::PvhEntryPresent(address) = loaded.pvh_boot_cap else {
        return Err(BootError::NoPvh(path.to_owned()));
    };
    if loaded.kernel_end > low_ram_end(memory) {
        return Err(BootError::KernelTooLarge {
            path: path.to_owned(),
            memory_mib: mib(memory),
        });
    }
    Ok((Entry { address: address.0 }, loaded.kernel_end))
}

/// Copies the initramfs to the end of RAM below the gap, and says where that is.
fn load_initramfs(
    memory: &Memory,
    path: &Path,
    kernel_end: u64,
) -> Result<hvm_modlist_entry, BootError> {
    let (mut image, size) = open("initramfs", path)?;
    let start = low_ram_end(memory)
        .checked_sub(size)
        .map(|start| start & !(PAGE - 1))
        .filter(|start| *start >= kernel_end.max(HIGH_MEMORY))
        .ok_or_else(|| BootError::InitramfsTooLarge {
            path: path.to_owned(),
            size,
            memory_mib: mib(memory),
        })?;
    memory
        .read_exact_volatile_from(GuestAddress(start), &mut image, size as usize)
        .map_err(|source| BootError::Copy {
            what: "initramfs",
            path: path.to_owned(),
            source,
        })?;
    Ok(hvm_modlist_entry {
        paddr: start,
        size,
        ..Default::default()
    })
}

fn open(what: &'static str, path: &Path) -> Result<(Image, u64), BootError> {
    let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
    let (metadata, file) = opened.map_err(|source| BootError::Open {
        what,
        path: path.to_owned(),
        source,
    })?;
    if !metadata.is_file() {
        return Err(BootError::NotAFile {
            what,
            path: path.to_owned(),
        });
    }
    let size = metadata.len();
    if size == 0 {
        return Err(BootError::Empty {
            what,
            path: path.to_owned(),
        });
    }
    let image = Image::map(file, size as usize).map_err(|source| BootError::Map {
        what,
        path: path.to_owned(),
        source,
    })?;
    Ok((image, size))
}

fn write_cmdline(memory: &Memory, cmdline: &str) -> Result<(), BootError> {
    if cmdline.len() >= CMDLINE_MAX {
        return Err(BootError::CmdlineTooLong(cmdline.len()));
    }
    if cmdline.contains('\0') {
        return Err(BootError::CmdlineZero);
    }
    // Fresh memory is zero: that ends the string.
    memory
        .write_slice(cmdline.as_bytes(), GuestAddress(CMDLINE))
        .map_err(|e| BootError::Table("the command line", e))
}

/// Lays `hvm_start_info`, the list of modules and the memory map down.
fn write_start_info(memory: &Memory, module: Option<hvm_modlist_entry>) -> Result<(), BootError> {
    let map = memory_map(memory);
    let module_address = START_INFO + size_of::<hvm_start_info>() as u64;
    let info = hvm_start_info {
        magic: START_MAGIC,
        version: 1,
        nr_modules: module.is_some().into(),
        modlist_paddr: if module.is_some() { module_address } else { 0 },
        cmdline_paddr: CMDLINE,
        memmap_paddr: MEMORY_MAP,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    let write = || {
        memory.write_obj(Plain(info), GuestAddress(START_INFO))?;
        if let Some(module) = module {
            memory.write_obj(Plain(module), GuestAddress(module_address))?;
        }
        for (i, entry) in map.iter().enumerate() {
            let address = MEMORY_MAP + (i * size_of::<hvm_memmap_table_entry>()) as u64;
            memory.write_obj(Plain(*entry), GuestAddress(address))?;
        }
        Ok(())
    };
    write().map_err(|e| BootError::Table("the start info", e))
}

/// The memory map as the guest sees it: RAM without the part of the first MiB that a PC reserves.
fn memory_map(memory: &Memory) -> Vec<hvm_memmap_table_entry> {
    let entry = |addr, end, type_| hvm_memmap_table_entry {
        addr,
        size: end - addr,
        type_,
        reserved: 0,
    };
    let mut map = vec![
        entry(0, MP_TABLE, MEMMAP_RAM),
        entry(MP_TABLE, HIGH_MEMORY, MEMMAP_RESERVED),
    ];
    for (start, length) in ram_ranges(memory_size(memory)) {
        map.push(entry(start.max(HIGH_MEMORY), start + length, MEMMAP_RAM));
    }
    map.retain(|entry| entry.size > 0);
    map
}

fn memory_size(memory: &Memory) -> u64 {
    memory.iter().map(|region| region.len()).sum()
}

fn mib(memory: &Memory) -> u64 {
    memory_size(memory) >> 20
}

fn low_ram_end(memory: &Memory) -> u64 {
    memory.iter().next().map_or(0, |region| region.len())
}

/// A structure of the boot protocol, to be written as it is.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
struct Plain<T>(T);

// SAFETY: A `repr(C)` structure of integers without padding.
unsafe impl ByteValued for Plain<hvm_start_info> {}
// SAFETY: As above.
unsafe impl ByteValued for Plain<hvm_modlist_entry> {}
// SAFETY: As above.
unsafe impl ByteValued for Plain<hvm_memmap_table_entry> {}
