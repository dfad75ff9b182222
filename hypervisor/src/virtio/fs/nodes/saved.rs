//! What a snapshot keeps of the nodes.

use std::collections::HashMap;
use std::ffi::{CStr, CString};

use rustix::fs::Statx;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::table::{Closing, Node, Slot, Table};
use super::{NodeRef, Nodes};
use crate::virtio::fs::identity::{self, Identity};
use crate::virtio::fs::policy::Cache;

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

impl Nodes {
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
}

impl Table {
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
}
