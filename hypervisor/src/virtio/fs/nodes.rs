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

use std::collections::{HashMap, VecDeque};
use std::ffi::{CStr, CString};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fs::Statx;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::descriptors::{Budget, Descriptor};
use super::identity::{self, Birth, Identity, Seen};
use super::policy::Cache;

/// How many nodes are held for speed alone.
const HELD: usize = 1024;

/// The deepest chain of parked nodes that is opened for one request.
const DEEPEST: usize = 4096;

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

pub(super) struct Node {
    /// Index of the parent; meaningless without a name.
    pub parent: u32,
    /// `None` for the root, and for what has no name any more or is lost.
    pub name: Option<Box<CStr>>,
    pub identity: Identity,
    pub birth: Birth,
    /// One of `S_IFMT`.
    pub kind: u32,
    /// How often the guest has been told of it and has not forgotten it.
    pub lookups: u64,
    /// How many nodes have this one as parent. It is kept for them even when the guest has forgotten it.
    pub children: u32,
    pub file: Option<Arc<Descriptor>>,
    pub cache: Cache,
    pub anchor: bool,
    /// Used since it was last considered for parking.
    recent: bool,
    /// Has an entry in the clock.
    clocked: bool,
}

#[derive(Default)]
struct Slot {
    generation: u32,
    node: Option<Node>,
}

/// Descriptors to be closed once the table is unlocked.
type Closing = Vec<Arc<Descriptor>>;

#[derive(Default)]
pub(super) struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
    known: HashMap<Identity, u32>,
    /// The held nodes that may be parked, in the order of a clock's hand.
    clock: VecDeque<NodeRef>,
    count: usize,
    crowded: bool,
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

/// What a snapshot keeps of a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedNode {
    /// The number by which the guest knows it.
    pub id: u64,
    /// The number of the parent.
    pub parent: u64,
    /// Its name there; `None` if it had none any more.
    pub name: Option<Vec<u8>>,
    /// Its type, one of `S_IFMT`.
    pub kind: u32,
    /// How often the guest was told of it.
    pub lookups: u64,
    /// Who changes it.
    pub cache: Cache,
}

/// Where to ask for a node's attributes.
enum Whereabouts {
    Held(Arc<Descriptor>),
    Place(NodeRef, Box<CStr>, Seen),
}

struct Step {
    node: NodeRef,
    name: Box<CStr>,
    seen: Seen,
}

impl Node {
    fn seen(&self) -> Seen {
        Seen {
            identity: self.identity,
            birth: self.birth,
            kind: self.kind,
            owned: self.cache == Cache::Owned,
        }
    }
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

    pub(super) fn lock(&self) -> MutexGuard<'_, Table> {
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

    /// Everything that the guest knows, but the root.
    pub fn save(&self) -> Vec<SavedNode> {
        let table = self.lock();
        let nodes = table.slots.iter().enumerate().skip(1);
        let saved = nodes.filter_map(|(index, slot)| {
            let node = slot.node.as_ref()?;
            Some(SavedNode {
                id: table.reference(index as u32).into(),
                parent: table.reference(node.parent).into(),
                name: node.name.as_ref().map(|name| name.to_bytes().to_vec()),
                kind: node.kind,
                lookups: node.lookups,
                cache: node.cache,
            })
        });
        saved.collect()
    }

    /// Puts back what [`save`](Self::save) gave. What is not where it was is a node whose file is gone: the
    /// guest gets `ESTALE` for it, and can forget it.
    ///
    /// # Errors
    ///
    /// `EINVAL` when `saved` is not what `save` can have given.
    pub fn restore(&self, saved: &[SavedNode]) -> Result<(), Errno> {
        let mut children: HashMap<u64, Vec<&SavedNode>> = HashMap::new();
        {
            let mut table = self.lock();
            for node in saved {
                table.restore(node, self.limits.nodes)?;
                if node.name.is_some() {
                    children.entry(node.parent).or_default().push(node);
                }
            }
            table.renumber();
        }
        // From the root downwards, so that a node's parent is there before it is asked for its children.
        let mut parents = vec![u64::from(NodeRef::ROOT)];
        while let Some(parent) = parents.pop() {
            let Some(nodes) = children.remove(&parent) else {
                continue;
            };
            let Ok(directory) = self.file(parent) else {
                continue;
            };
            for node in nodes {
                let name = CString::new(node.name.clone().unwrap_or_default());
                let name = name.map_err(|_| Errno::INVAL)?;
                let Ok(stat) = identity::stat(&*directory, &name) else {
                    continue;
                };
                if identity::kind(&stat) == node.kind {
                    let anchor = self.lock().place_restored(node, &name, &stat);
                    if !anchor || self.open(node.id).is_ok() {
                        parents.push(node.id);
                    }
                }
            }
        }
        Ok(())
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

impl Table {
    fn reset(&mut self, file: Arc<Descriptor>, stat: &Statx) {
        let identity = Identity::of(stat);
        self.slots.push(Slot {
            generation: 0,
            node: Some(Node {
                parent: 0,
                name: None,
                identity,
                birth: identity::birth(stat),
                kind: identity::kind(stat),
                lookups: 0,
                children: 0,
                file: Some(file),
                cache: Cache::Root,
                anchor: true,
                recent: false,
                clocked: false,
            }),
        });
        self.known.insert(identity, 0);
        self.count = 1;
    }

    /// Makes a node with the number, but not yet the place, of `saved`.
    fn restore(&mut self, saved: &SavedNode, most: usize) -> Result<(), Errno> {
        let reference = NodeRef::from_id(saved.id).ok_or(Errno::INVAL)?;
        let index = reference.index as usize;
        // The slots of a table are at most as many as its nodes once were.
        if index == 0 || index > most {
            return Err(Errno::INVAL);
        }
        if self.slots.len() <= index {
            self.slots.resize_with(index + 1, Slot::default);
        }
        let slot = self.slots.get_mut(index).ok_or(Errno::INVAL)?;
        if slot.node.is_some() {
            return Err(Errno::INVAL);
        }
        slot.generation = reference.generation;
        slot.node = Some(Node {
            parent: 0,
            name: None,
            identity: Identity::default(),
            birth: None,
            kind: saved.kind,
            lookups: saved.lookups,
            children: 0,
            file: None,
            cache: saved.cache,
            anchor: false,
            recent: false,
            clocked: false,
        });
        self.count += 1;
        Ok(())
    }

    /// After a restore: free slots, and no number that was given away before.
    fn renumber(&mut self) {
        let last = self.slots.iter().map(|slot| slot.generation).max();
        let next = last.unwrap_or(0).wrapping_add(1);
        self.free.clear();
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if slot.node.is_none() {
                slot.generation = next;
                self.free.push(index as u32);
            }
        }
    }

    /// The file of a restored node has been found, `stat` is of it. Whether it must be held from now on.
    fn place_restored(&mut self, saved: &SavedNode, name: &CStr, stat: &Statx) -> bool {
        let identity = Identity::of(stat);
        let (Ok((node, _)), Ok((parent, parent_node))) =
            (self.get(saved.id), self.get(saved.parent))
        else {
            return false;
        };
        let anchor = !identity.same_mount(&parent_node.identity);
        self.put(node.index, parent.index, name, &mut Closing::new());
        if let Some(node) = self.node_mut(node.index) {
            node.identity = identity;
            node.birth = identity::birth(stat);
            node.anchor = anchor;
        }
        self.known.insert(identity, node.index);
        anchor
    }

    fn node(&self, index: u32) -> Option<&Node> {
        self.slots.get(index as usize)?.node.as_ref()
    }

    fn node_mut(&mut self, index: u32) -> Option<&mut Node> {
        self.slots.get_mut(index as usize)?.node.as_mut()
    }

    fn get(&self, id: u64) -> Result<(NodeRef, &Node), Errno> {
        let node = NodeRef::from_id(id).ok_or(Errno::STALE)?;
        let slot = self.slots.get(node.index as usize);
        let slot = slot.filter(|slot| slot.generation == node.generation);
        Ok((
            node,
            slot.and_then(|s| s.node.as_ref()).ok_or(Errno::STALE)?,
        ))
    }

    fn reference(&self, index: u32) -> NodeRef {
        let slot = self.slots.get(index as usize);
        NodeRef {
            index,
            generation: slot.map_or(0, |slot| slot.generation),
        }
    }

    fn is_current(&self, node: NodeRef) -> bool {
        self.get(node.into()).is_ok()
    }

    fn is_at(&self, node: NodeRef, parent: u32, name: &CStr) -> bool {
        let found = self.get(node.into());
        found.is_ok_and(|(_, n)| n.parent == parent && n.name.as_deref() == Some(name))
    }

    /// The nearest held node on the way to `node`, and the steps from `node` back to it.
    fn way_to(&mut self, node: NodeRef) -> Result<(Arc<Descriptor>, Vec<Step>), Errno> {
        let mut steps = Vec::new();
        let mut index = node.index;
        loop {
            let reference = self.reference(index);
            let node = self.node_mut(index).ok_or(Errno::STALE)?;
            if let Some(file) = &node.file {
                node.recent = true;
                return Ok((file.clone(), steps));
            }
            if steps.len() == DEEPEST {
                return Err(Errno::STALE);
            }
            steps.push(Step {
                node: reference,
                name: node.name.clone().ok_or(Errno::STALE)?,
                seen: node.seen(),
            });
            index = node.parent;
        }
    }

    fn whereabouts(&mut self, id: u64) -> Result<Whereabouts, Errno> {
        let (reference, _) = self.get(id)?;
        let node = self.node_mut(reference.index).ok_or(Errno::STALE)?;
        if let Some(file) = &node.file {
            return Ok(Whereabouts::Held(file.clone()));
        }
        let name = node.name.clone().ok_or(Errno::STALE)?;
        let (parent, seen) = (node.parent, node.seen());
        Ok(Whereabouts::Place(self.reference(parent), name, seen))
    }

    /// Gives `node` the descriptor `file` unless it has one, and returns the one it has.
    fn hold(&mut self, reference: NodeRef, file: Arc<Descriptor>) -> Arc<Descriptor> {
        if !self.is_current(reference) {
            return file;
        }
        let Some(node) = self.node_mut(reference.index) else {
            return file;
        };
        node.recent = true;
        let file = node.file.get_or_insert(file).clone();
        if !node.anchor && !node.clocked && node.name.is_some() {
            node.clocked = true;
            self.clock.push_back(reference);
        }
        file
    }

    /// The known node with this identity. A parked one does not keep its inode number from being
    /// used again: if the birth differs, it is another file, and the node is lost.
    fn recognise(
        &mut self,
        identity: &Identity,
        birth: Birth,
        closing: &mut Closing,
    ) -> Option<u32> {
        let index = *self.known.get(identity)?;
        let node = self.node(index)?;
        if node.file.is_some() || node.kind == libc::S_IFDIR || node.birth == birth {
            return Some(index);
        }
        self.known.remove(identity);
        self.lose(index, closing);
        None
    }

    fn add(&mut self, node: Node) -> u32 {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot::default());
                (self.slots.len() - 1) as u32
            }
        };
        if let Some(parent) = self.node_mut(node.parent) {
            parent.children += 1;
        }
        self.known.insert(node.identity, index);
        self.count += 1;
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.node = Some(node);
        }
        index
    }

    /// The place of node `index` is `name` in `parent` from now on.
    fn put(&mut self, index: u32, parent: u32, name: &CStr, closing: &mut Closing) {
        let Some(node) = self.node(index) else {
            return;
        };
        if index == 0 || (node.parent == parent && node.name.as_deref() == Some(name)) {
            return;
        }
        let old = node.name.is_some().then_some(node.parent);
        if let Some(new) = self.node_mut(parent) {
            new.children += 1;
        }
        let reference = self.reference(index);
        if let Some(node) = self.node_mut(index) {
            node.parent = parent;
            node.name = Some(name.into());
            if node.file.is_some() && !node.anchor && !node.clocked {
                node.clocked = true;
                self.clock.push_back(reference);
            }
        }
        if let Some(old) = old {
            self.drop_child(old, closing);
        }
    }

    /// Node `index` has no place any more.
    fn lose(&mut self, index: u32, closing: &mut Closing) {
        let Some(node) = self.node_mut(index) else {
            return;
        };
        if node.name.take().is_some() {
            let parent = node.parent;
            self.drop_child(parent, closing);
        }
    }

    fn drop_child(&mut self, parent: u32, closing: &mut Closing) {
        if let Some(node) = self.node_mut(parent) {
            node.children = node.children.saturating_sub(1);
            self.remove_unused(parent, closing);
        }
    }

    fn forget(&mut self, id: u64, count: u64, closing: &mut Closing) {
        let Ok((reference, _)) = self.get(id) else {
            return;
        };
        if let Some(node) = self.node_mut(reference.index) {
            node.lookups = node.lookups.saturating_sub(count);
            self.remove_unused(reference.index, closing);
        }
    }

    /// Removes node `index` if nobody needs it, and then its parent likewise, and so on.
    fn remove_unused(&mut self, mut index: u32, closing: &mut Closing) {
        while index != 0 {
            let Some(slot) = self.slots.get_mut(index as usize) else {
                return;
            };
            let Some(node) = slot.node.take_if(|n| n.lookups == 0 && n.children == 0) else {
                return;
            };
            slot.generation = slot.generation.wrapping_add(1);
            self.free.push(index);
            self.count -= 1;
            if self.known.get(&node.identity) == Some(&index) {
                self.known.remove(&node.identity);
            }
            closing.extend(node.file);
            if node.name.is_none() {
                return;
            }
            index = node.parent;
            if let Some(parent) = self.node_mut(index) {
                parent.children = parent.children.saturating_sub(1);
            }
        }
    }

    fn count_lookup(&mut self, index: u32) -> Result<(u64, Cache, bool), Errno> {
        let id = self.reference(index).into();
        let node = self.node_mut(index).ok_or(Errno::STALE)?;
        node.lookups = node.lookups.saturating_add(1);
        Ok((id, node.cache, node.anchor && node.file.is_none()))
    }

    fn crowd(&mut self, limit: usize) -> Option<usize> {
        let now = self.count >= limit && !self.crowded;
        self.crowded |= now;
        now.then_some(self.count)
    }

    /// The next node to park, while more than `held` are held: itself, its place, its descriptor.
    fn candidate(&mut self, held: usize) -> Option<(NodeRef, NodeRef, Box<CStr>, Arc<Descriptor>)> {
        let mut turns = self.clock.len().saturating_mul(2);
        while self.clock.len() > held && turns > 0 {
            turns -= 1;
            let reference = self.clock.pop_front()?;
            if !self.is_current(reference) {
                continue;
            }
            let node = self.node_mut(reference.index)?;
            node.clocked = false;
            if std::mem::take(&mut node.recent) {
                node.clocked = true;
                self.clock.push_back(reference);
                continue;
            }
            // A node without a name is held for good and leaves the clock.
            if let (Some(file), Some(name)) = (node.file.clone(), node.name.clone()) {
                let parent = node.parent;
                return Some((reference, self.reference(parent), name, file));
            }
        }
        None
    }

    fn park(
        &mut self,
        reference: NodeRef,
        parent: &NodeRef,
        name: &CStr,
        stat: &Statx,
        closing: &mut Closing,
    ) {
        if !self.is_at(reference, parent.index, name) {
            return self.clock_again(reference);
        }
        let identity = Identity::of(stat);
        let Some(node) = self.node_mut(reference.index) else {
            return;
        };
        let old = std::mem::replace(&mut node.identity, identity);
        node.birth = identity::birth(stat);
        closing.extend(node.file.take());
        if old != identity {
            if self.known.get(&old) == Some(&reference.index) {
                self.known.remove(&old);
            }
            self.known.insert(identity, reference.index);
        }
    }

    fn clock_again(&mut self, reference: NodeRef) {
        if !self.is_current(reference) {
            return;
        }
        if let Some(node) = self.node_mut(reference.index)
            && node.file.is_some()
            && node.name.is_some()
            && !node.anchor
            && !node.clocked
        {
            node.clocked = true;
            self.clock.push_back(reference);
        }
    }
}
