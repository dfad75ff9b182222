//! One FUSE request, from its descriptor chain to its reply.
//!
//! virtiofsd's `Server` knows the protocol. What it takes for granted is made sure of here: that a reply has
//! room for its header. What it gives up on without a reply (a request cut short, a length that
//! lies, a name without its end) gets one: `EINVAL`.

use std::io::Write;
use std::sync::Arc;

use vhost_user_backend::bitmap::BitmapMmapRegion;
use virtio_queue::DescriptorChain;
use virtiofsd::descriptor_utils::{Reader, Writer};
use virtiofsd::fuse::{InHeader, Opcode, OutHeader};
use virtiofsd::server::Server;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{ByteValued, GuestMemory, GuestMemoryMmap, GuestMemoryRegion, GuestRegionMmap};

use super::super::Memory;
use super::share::{Share, listing};

/// Guest memory as virtiofsd's reader and writer want it: the same mappings under another type.
type View = GuestMemoryMmap<BitmapMmapRegion>;

/// Answers requests that lie in one guest's memory.
pub struct Requests {
    server: Arc<Server<Share>>,
    view: View,
    /// Keeps mapped what `view` shows.
    _memory: Arc<Memory>,
}

/// The memory cannot be shown to virtiofsd.
#[derive(Debug, thiserror::Error)]
#[error("Cannot describe guest memory to the file server: {0}")]
pub struct ViewError(String);

impl Requests {
    /// For requests to `server` in `memory`.
    ///
    /// # Errors
    ///
    /// A region of `memory` is not what a mapping can be.
    pub fn new(server: Arc<Server<Share>>, memory: Arc<Memory>) -> Result<Self, ViewError> {
        let mut regions = Vec::new();
        for region in memory.iter() {
            let builder = MmapRegionBuilder::<BitmapMmapRegion>::new(region.size())
                .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
                .with_mmap_flags(region.flags());
            // SAFETY: `region` is a mapping of that size, and `_memory` keeps it as long as the view lives.
            let builder = unsafe { builder.with_raw_mmap_pointer(region.as_ptr()) };
            let mapping = builder.build().map_err(|e| ViewError(e.to_string()))?;
            let region = GuestRegionMmap::new(mapping, region.start_addr());
            regions.push(region.ok_or_else(|| ViewError("a region wraps around".into()))?);
        }
        Ok(Self {
            server,
            view: View::from_regions(regions).map_err(|e| ViewError(e.to_string()))?,
            _memory: memory,
        })
    }

    /// Carries out the request in `chain` and returns how many bytes its reply has.
    pub fn serve(&self, chain: DescriptorChain<Arc<Memory>>) -> u32 {
        let (Ok(reader), Ok(writer)) = (
            Reader::new(&self.view, chain.clone()),
            Writer::new(&self.view, chain.clone()),
        ) else {
            return 0;
        };
        let Ok(header) = reader.clone().read_obj::<InHeader>() else {
            return self.refuse(chain, 0, libc::EINVAL);
        };
        let opcode = Opcode::try_from(header.opcode).ok();
        let silent = matches!(
            opcode,
            Some(Opcode::Forget | Opcode::BatchForget | Opcode::Interrupt | Opcode::Destroy)
        );
        if !silent && writer.available_bytes() < size_of::<OutHeader>() {
            return 0;
        }
        let handle = || self.server.handle_message::<()>(reader, writer, None);
        let written = match opcode {
            Some(Opcode::Readdirplus) => listing(handle),
            _ => handle(),
        };
        match written {
            Ok(written) => written as u32,
            Err(e) => {
                log::debug!("A request with opcode {} is not sound: {e}", header.opcode);
                match silent {
                    true => 0,
                    false => self.refuse(chain, header.unique, libc::EINVAL),
                }
            }
        }
    }

    fn refuse(&self, chain: DescriptorChain<Arc<Memory>>, unique: u64, error: i32) -> u32 {
        let header = OutHeader {
            len: size_of::<OutHeader>() as u32,
            error: -error,
            unique,
        };
        let writer = Writer::<BitmapMmapRegion>::new(&self.view, chain);
        match writer.map(|mut writer| writer.write_all(header.as_slice())) {
            Ok(Ok(())) => header.len,
            _ => 0,
        }
    }
}
