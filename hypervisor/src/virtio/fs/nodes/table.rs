//! The table behind [`Nodes`](super::Nodes): every node with its place, and which of them are held. What is done here is
//! done under the table's lock, so nothing here asks the host; descriptors to be closed are handed out.

use std::collections::{HashMap, VecDeque};
use std::ffi::CStr;
use std::sync::Arc;

use rustix::fs::Statx;
use rustix::io::Errno;

use super::NodeRef;
use crate::virtio::fs::descriptors::Descriptor;
use crate::virtio::fs::identity::{self, Birth, Identity, Seen};
use crate::virtio::fs::policy::Cache;

/// The deepest chain of parked nodes that is opened for one request.
const DEEPEST: usize = 4096;

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
    pub(super) recent: bool,
    /// Has an entry in the clock.
    pub(super) clocked: bool,
}

#[derive(Default)]
pub(super) struct Slot {
    pub(super) generation: u32,
    pub(super) node: Option<Node>,
}

// With its name, its entry in `known`, and what vectors and maps have to spare, an inode takes some 200 bytes (211 were
// measured for 100,000 of them with names of four letters). A guest decides how many there are.
const _: () = assert!(size_of::<Slot>() <= 104);

/// Descriptors to be closed once the table is unlocked.
pub(super) type Closing = Vec<Arc<Descriptor>>;

#[derive(Default)]
pub(super) struct Table {
    pub(super) slots: Vec<Slot>,
    pub(super) free: Vec<u32>,
    pub(super) known: HashMap<Identity, u32>,
    /// The held nodes that may be parked, in the order of a clock's hand.
    clock: VecDeque<NodeRef>,
    pub(super) count: usize,
    pub(super) crowded: bool,
}

/// Where to ask for a node's attributes.
pub(super) enum Whereabouts {
    Held(Arc<Descriptor>),
    Place(NodeRef, Box<CStr>, Seen),
}

pub(super) struct Step {
    pub(super) node: NodeRef,
    pub(super) name: Box<CStr>,
    pub(super) seen: Seen,
}

impl Node {
    pub(super) fn seen(&self) -> Seen {
        Seen {
            identity: self.identity,
            birth: self.birth,
            kind: self.kind,
            owned: self.cache == Cache::Owned,
        }
    }
}

impl Table {
    pub(super) fn reset(&mut self, file: Arc<Descriptor>, stat: &Statx) {
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

    pub(super) fn node(&self, index: u32) -> Option<&Node> {
        self.slots.get(index as usize)?.node.as_ref()
    }

    pub(super) fn node_mut(&mut self, index: u32) -> Option<&mut Node> {
        self.slots.get_mut(index as usize)?.node.as_mut()
    }

    pub(super) fn get(&self, id: u64) -> Result<(NodeRef, &Node), Errno> {
        let node = NodeRef::from_id(id).ok_or(Errno::STALE)?;
        let slot = self.slots.get(node.index as usize);
        let slot = slot.filter(|slot| slot.generation == node.generation);
        Ok((
            node,
            slot.and_then(|s| s.node.as_ref()).ok_or(Errno::STALE)?,
        ))
    }

    pub(super) fn reference(&self, index: u32) -> NodeRef {
        let slot = self.slots.get(index as usize);
        NodeRef {
            index,
            generation: slot.map_or(0, |slot| slot.generation),
        }
    }

    pub(super) fn is_current(&self, node: NodeRef) -> bool {
        self.get(node.into()).is_ok()
    }

    pub(super) fn is_at(&self, node: NodeRef, parent: u32, name: &CStr) -> bool {
        let found = self.get(node.into());
        found.is_ok_and(|(_, n)| n.parent == parent && n.name.as_deref() == Some(name))
    }

    /// The nearest held node on the way to `node`, and the steps from `node` back to it.
    pub(super) fn way_to(&mut self, node: NodeRef) -> Result<(Arc<Descriptor>, Vec<Step>), Errno> {
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

    pub(super) fn whereabouts(&mut self, id: u64) -> Result<Whereabouts, Errno> {
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
    pub(super) fn hold(&mut self, reference: NodeRef, file: Arc<Descriptor>) -> Arc<Descriptor> {
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
    pub(super) fn recognise(
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

    pub(super) fn add(&mut self, node: Node) -> u32 {
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
    pub(super) fn put(&mut self, index: u32, parent: u32, name: &CStr, closing: &mut Closing) {
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
    pub(super) fn lose(&mut self, index: u32, closing: &mut Closing) {
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

    pub(super) fn forget(&mut self, id: u64, count: u64, closing: &mut Closing) {
        let Ok((reference, _)) = self.get(id) else {
            return;
        };
        if let Some(node) = self.node_mut(reference.index) {
            node.lookups = node.lookups.saturating_sub(count);
            self.remove_unused(reference.index, closing);
        }
    }

    /// Removes node `index` if nobody needs it, and then its parent likewise, and so on.
    pub(super) fn remove_unused(&mut self, mut index: u32, closing: &mut Closing) {
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

    pub(super) fn count_lookup(&mut self, index: u32) -> Result<(u64, Cache, bool), Errno> {
        let id = self.reference(index).into();
        let node = self.node_mut(index).ok_or(Errno::STALE)?;
        node.lookups = node.lookups.saturating_add(1);
        Ok((id, node.cache, node.anchor && node.file.is_none()))
    }

    pub(super) fn crowd(&mut self, limit: usize) -> Option<usize> {
        let now = self.count >= limit && !self.crowded;
        self.crowded |= now;
        now.then_some(self.count)
    }

    /// The next node to park, while more than `held` are held: itself, its place, its descriptor.
    pub(super) fn candidate(
        &mut self,
        held: usize,
    ) -> Option<(NodeRef, NodeRef, Box<CStr>, Arc<Descriptor>)> {
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

    pub(super) fn park(
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

    pub(super) fn clock_again(&mut self, reference: NodeRef) {
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
