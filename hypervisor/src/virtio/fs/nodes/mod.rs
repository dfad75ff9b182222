//! The inodes of a share that the guest knows.
//!
//! A guest keeps what it has looked up, easily hundreds of thousands of inodes. One descriptor for
//! each would exhaust the process, and pin as much in the host's kernel. So a node is remembered by its
//! *place*, its parent and its name there, and by its [`Identity`]. It is *held*, that is it has a
//! descriptor (`O_PATH`), only when an operation needed one lately, and *parked* otherwise. When a parked node is
//! needed, it is opened by its place, and taken only if it is the file that the guest means.
//!
//! What makes places reliable:
//! - Everything that the guest renames or removes goes through here. A node that loses its name is held from
//!   before that until the guest forgets it.
//! - A node is parked only if its place still leads to it.
//! - Where the host moves a file behind the guest's back, the parked node is stale (`ESTALE`). Linux then looks
//!   the path up again, and the node gets its new place.
//! - The first node in each mount (an *anchor*) is always held. It keeps the mount alive, so the numbers
//!   that make up an identity are not used again for another one.

mod saved;
mod table;

use std::ffi::CStr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::Statx;
use rustix::io::Errno;

use super::descriptors::{Budget, Descriptor};
use super::identity::{self, Identity};
use super::policy::Cache;
pub use saved::SavedNode;
use table::{Closing, Node, Slot, Table, Whereabouts};

/// How many nodes are held for speed alone.
const HELD: usize = 1024;

/// A node that was there once; it may be gone when it is used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeRef {
    index: u32,
    generation: u32,
}

/// The number by which the guest knows a node. Numbers are never used again: the upper half counts how
/// often the lower half (the index, plus 1) was given away. The root is 1 (`FUSE_ROOT_ID`).
impl From<NodeRef> for u64 {
    fn from(node: NodeRef) -> u64 {
        (u64::from(node.generation) << 32) | (u64::from(node.index) + 1)
    }
}

impl NodeRef {
    const ROOT: Self = Self {
        index: 0,
        generation: 0,
    };

    fn from_id(id: u64) -> Option<Self> {
        Some(Self {
            index: (id as u32).checked_sub(1)?,
            generation: (id >> 32) as u32,
        })
    }
}

/// What a share may take.
#[derive(Clone, Copy)]
pub struct Limits {
    /// The most nodes.
    pub nodes: usize,
    /// The number of nodes from which on [`Claim::crowded`] tells.
    pub crowd: usize,
    /// Where descriptors come from.
    pub budget: &'static Budget,
}

/// The nodes of one share.
pub struct Nodes {
    table: Mutex<Table>,
    limits: Limits,
    held: AtomicUsize,
}

/// A node that the guest has been told of once more.
pub struct Claim {
    /// The node's number.
    pub id: u64,
    /// How it may be cached.
    pub cache: Cache,
    /// How its name may be cached.
    pub name_cache: Cache,
    /// Whether it lies in another mount than its parent.
    pub other_mount: bool,
    /// The number of nodes, when it has just become too large.
    pub crowded: Option<usize>,
}

impl Nodes {
    /// Only the root, which is `file`.
    pub fn new(file: Descriptor, stat: &Statx, limits: Limits) -> Self {
        let nodes = Self {
            table: Mutex::default(),
            limits,
            held: AtomicUsize::new(HELD),
        };
        nodes.lock().reset(Arc::new(file), stat);
        nodes
    }

    /// Forgets everything but the root.
    pub fn clear(&self) {
        let mut table = self.lock();
        let Some(root) = table.slots.first_mut().and_then(|slot| slot.node.take()) else {
            return;
        };
        let old = std::mem::take(&mut *table);
        table.slots.push(Slot {
            generation: 0,
            node: Some(Node {
                children: 0,
                lookups: 0,
                ..root
            }),
        });
        if let Some(identity) = table.node(0).map(|node| node.identity) {
            table.known.insert(identity, 0);
        }
        // Numbers stay unique: what the guest still uses of the old ones must not mean anything new.
        for (index, slot) in old.slots.iter().enumerate().skip(1) {
            table.slots.push(Slot {
                generation: slot.generation.wrapping_add(1),
                node: None,
            });
            table.free.push(index as u32);
        }
        table.count = 1;
        drop(table);
        drop(old);
    }

    /// The number of nodes.
    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.lock().count
    }

    /// The number of nodes that have a descriptor.
    #[cfg(test)]
    pub fn count_held(&self) -> usize {
        let table = self.lock();
        let nodes = table.slots.iter().filter_map(|slot| slot.node.as_ref());
        nodes.filter(|node| node.file.is_some()).count()
    }

    /// Parks from the first node on that is held beyond `held`.
    #[cfg(test)]
    pub fn hold_at_most(&self, held: usize) {
        self.held.store(held, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How node `id` may be cached, and its type (one of `S_IFMT`).
    ///
    /// # Errors
    ///
    /// `ESTALE` when there is no such node.
    pub fn nature(&self, id: u64) -> Result<(Cache, u32), Errno> {
        let table = self.lock();
        let node = table.get(id)?.1;
        Ok((node.cache, node.kind))
    }

    /// Whether node `id` lies in the mount that the root lies in, and not in one below.
    ///
    /// # Errors
    ///
    /// `ESTALE` when there is no such node.
    pub fn is_in_roots_mount(&self, id: u64) -> Result<bool, Errno> {
        let table = self.lock();
        let root = table.node(0).ok_or(Errno::STALE)?;
        let node = table.get(id)?.1;
        Ok(node.identity.same_mount(&root.identity))
    }

    /// A reference (`O_PATH`) to node `id`.
    ///
    /// # Errors
    ///
    /// `ESTALE` when there is no such node, or no such file any more where it was.
    pub fn file(&self, id: u64) -> Result<Arc<Descriptor>, Errno> {
        let file = self.open(id)?;
        self.park_some();
        Ok(file)
    }

    /// As [`file`](Self::file), without parking others for it.
    fn open(&self, id: u64) -> Result<Arc<Descriptor>, Errno> {
        let (mut file, steps) = {
            let mut table = self.lock();
            let node = table.get(id)?.0;
            table.way_to(node)?
        };
        for step in steps.into_iter().rev() {
            let opened =
                identity::refer(&*file, &step.name, self.limits.budget).map_err(gone_is_stale)?;
            let stat = identity::stat(&opened, c"")?;
            if !step.seen.is(&stat) {
                return Err(Errno::STALE);
            }
            file = self.lock().hold(step.node, Arc::new(opened));
        }
        Ok(file)
    }

    /// The attributes of node `id`.
    ///
    /// # Errors
    ///
    /// As for [`file`](Self::file).
    pub fn stat(&self, id: u64) -> Result<Statx, Errno> {
        let whereabouts = self.lock().whereabouts(id)?;
        match whereabouts {
            Whereabouts::Held(file) => identity::stat(&*file, c""),
            Whereabouts::Place(parent, name, seen) => {
                let parent = self.file(parent.into())?;
                let stat = identity::stat(&*parent, &name).map_err(gone_is_stale)?;
                seen.is(&stat).then_some(stat).ok_or(Errno::STALE)
            }
        }
    }

    /// The guest is told of the file that `stat` is of, `name` in `parent`.
    ///
    /// # Errors
    ///
    /// `ESTALE` without the parent; `ENFILE` when there are too many nodes.
    pub fn claim(
        &self,
        parent: u64,
        name: &CStr,
        stat: &Statx,
        cache_of: impl FnOnce(Cache) -> Cache,
    ) -> Result<Claim, Errno> {
        let mut closing = Closing::new();
        let mut table = self.lock();
        let (parent, parent_node) = table.get(parent)?;
        let name_cache = parent_node.cache;
        let identity = Identity::of(stat);
        let other_mount = !identity.same_mount(&parent_node.identity);
        let node = match table.recognise(&identity, identity::birth(stat), &mut closing) {
            Some(index) => {
                table.put(index, parent.index, name, &mut closing);
                index
            }
            None if table.count >= self.limits.nodes => return Err(Errno::NFILE),
            None => table.add(Node {
                parent: parent.index,
                name: Some(name.into()),
                identity,
                birth: identity::birth(stat),
                kind: identity::kind(stat),
                lookups: 0,
                children: 0,
                file: None,
                cache: cache_of(name_cache),
                anchor: other_mount,
                recent: false,
                clocked: false,
            }),
        };
        let crowded = table.crowd(self.limits.crowd);
        let (id, cache, anchor) = table.count_lookup(node)?;
        drop(table);
        drop(closing);
        if anchor && let Err(e) = self.open(id) {
            self.forget(&[(id, 1)]);
            return Err(e);
        }
        Ok(Claim {
            id,
            cache,
            name_cache,
            other_mount,
            crowded,
        })
    }

    /// The guest drops `count` of what it was told of each node.
    pub fn forget(&self, nodes: &[(u64, u64)]) {
        let mut closing = Closing::new();
        let mut table = self.lock();
        for &(id, count) in nodes {
            table.forget(id, count, &mut closing);
        }
        if table.count < self.limits.crowd / 2 {
            table.crowded = false;
        }
        drop(table);
        drop(closing);
    }

    /// The node of file `name` in `dir`, if the guest knows it. It is held from here on, so that it can lose that name.
    pub fn hold_named(&self, dir: &Descriptor, name: &CStr) -> Option<NodeRef> {
        let file = identity::refer(dir, name, self.limits.budget).ok()?;
        let stat = identity::stat(&file, c"").ok()?;
        let mut closing = Closing::new();
        let mut table = self.lock();
        let (identity, birth) = (Identity::of(&stat), identity::birth(&stat));
        let index = table.recognise(&identity, birth, &mut closing)?;
        let node = table.reference(index);
        let _held = table.hold(node, Arc::new(file));
        drop(table);
        drop(closing);
        Some(node)
    }

    /// `node` has lost the name `name` in `parent`.
    pub fn unnamed(&self, node: NodeRef, parent: u64, name: &CStr) {
        let mut closing = Closing::new();
        let mut table = self.lock();
        let Some(parent) = NodeRef::from_id(parent) else {
            return;
        };
        if table.is_at(node, parent.index, name) {
            table.lose(node.index, &mut closing);
        }
        drop(table);
        drop(closing);
    }

    /// `node` is now `name` in `parent`.
    pub fn renamed(&self, node: NodeRef, parent: u64, name: &CStr) {
        let mut closing = Closing::new();
        let mut table = self.lock();
        if let (Ok((parent, _)), true) = (table.get(parent), table.is_current(node)) {
            table.put(node.index, parent.index, name, &mut closing);
        }
        drop(table);
        drop(closing);
    }

    /// Parks what has been held longest, until few enough are held.
    fn park_some(&self) {
        let held = self.held.load(Ordering::Relaxed);
        loop {
            let candidate = self.lock().candidate(held);
            let Some((node, parent, name, file)) = candidate else {
                return;
            };
            let found = self
                .open(parent.into())
                .and_then(|parent| identity::stat(&*parent, &name));
            // A copy-up of overlayfs, for one, changes the time of birth: the one of now is to be found again.
            let there = found.and_then(|found| {
                let here = identity::stat(&*file, c"")?;
                let same = Identity::of(&found) == Identity::of(&here);
                Ok(same.then_some(found))
            });
            drop(file);
            let mut closing = Closing::new();
            let mut table = self.lock();
            match there {
                Ok(Some(stat)) => table.park(node, &parent, &name, &stat, &mut closing),
                Ok(None) | Err(Errno::NOENT | Errno::NOTDIR | Errno::STALE) => {
                    if table.is_at(node, parent.index, &name) {
                        table.lose(node.index, &mut closing);
                    }
                }
                // A passing failure; it stays held and comes round again.
                Err(_) => return table.clock_again(node),
            }
            drop(table);
            drop(closing);
        }
    }
}

fn gone_is_stale(error: Errno) -> Errno {
    match error {
        Errno::NOENT | Errno::NOTDIR => Errno::STALE,
        other => other,
    }
}
