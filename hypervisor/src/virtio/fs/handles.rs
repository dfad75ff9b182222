//! The files that the guest has open.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::descriptors::Descriptor;

/// An open file or directory.
pub struct Handle {
    /// The number of the node that it is of.
    pub node: u64,
    /// The descriptor, open as the guest asked.
    pub file: Descriptor,
    /// The flags that it was opened with (`O_*`).
    pub flags: u32,
    /// Whoever reads a directory moves the descriptor's position, and holds this meanwhile.
    pub position: Mutex<()>,
}

/// What a snapshot keeps of an open file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedHandle {
    /// The number by which the guest knows it.
    pub number: u64,
    /// The number of its node.
    pub node: u64,
    /// The flags that it was opened with (`O_*`).
    pub flags: u32,
}

/// More handles than any process can have.
const MOST_HANDLES: usize = 1 << 30;

fn number(index: usize, generation: u32) -> u64 {
    (u64::from(generation) << 32) | index as u64
}

#[derive(Default)]
struct Slot {
    generation: u32,
    handle: Option<Arc<Handle>>,
}

#[derive(Default)]
struct Table {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// All open files of a share. Numbers are never used again: the upper half counts how often the lower half
/// was given away.
#[derive(Default)]
pub struct Handles(Mutex<Table>);

impl Handles {
    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps an open file and gives it a number.
    pub fn add(&self, node: u64, file: Descriptor, flags: u32) -> u64 {
        let handle = Arc::new(Handle {
            node,
            file,
            flags,
            position: Mutex::default(),
        });
        let mut table = self.lock();
        let index = table.free.pop().unwrap_or_else(|| {
            table.slots.push(Slot::default());
            (table.slots.len() - 1) as u32
        });
        let slot = &mut table.slots[index as usize];
        slot.handle = Some(handle);
        number(index as usize, slot.generation)
    }

    /// Open file `number` of `node`.
    ///
    /// # Errors
    ///
    /// `EBADF` when there is none.
    pub fn get(&self, number: u64, node: u64) -> Result<Arc<Handle>, Errno> {
        let table = self.lock();
        let slot = table.slots.get(number as u32 as usize);
        let slot = slot.filter(|slot| u64::from(slot.generation) == number >> 32);
        let handle = slot.and_then(|slot| slot.handle.as_ref());
        let handle = handle.filter(|handle| handle.node == node);
        handle.cloned().ok_or(Errno::BADF)
    }

    /// Closes open file `number` of `node`.
    ///
    /// # Errors
    ///
    /// `EBADF` when there is none.
    pub fn close(&self, number: u64, node: u64) -> Result<(), Errno> {
        let handle = self.get(number, node)?;
        let mut table = self.lock();
        let index = number as u32;
        if let Some(slot) = table.slots.get_mut(index as usize)
            && u64::from(slot.generation) == number >> 32
            && slot.handle.take().is_some()
        {
            slot.generation = slot.generation.wrapping_add(1);
            table.free.push(index);
        }
        drop(table);
        // Closing may take its time, and must not hold up the others.
        drop(handle);
        Ok(())
    }

    /// Closes everything.
    pub fn clear(&self) {
        let mut closing = Vec::new();
        let mut table = self.lock();
        for index in 0..table.slots.len() {
            let slot = &mut table.slots[index];
            if let Some(handle) = slot.handle.take() {
                slot.generation = slot.generation.wrapping_add(1);
                closing.push(handle);
                table.free.push(index as u32);
            }
        }
        drop(table);
    }

    /// Every open file.
    pub fn save(&self) -> Vec<SavedHandle> {
        let table = self.lock();
        let slots = table.slots.iter().enumerate();
        let saved = slots.filter_map(|(index, slot)| {
            let handle = slot.handle.as_ref()?;
            Some(SavedHandle {
                number: number(index, slot.generation),
                node: handle.node,
                flags: handle.flags,
            })
        });
        saved.collect()
    }

    /// Puts back what [`save`](Self::save) gave; `open` opens the file of a handle. What cannot be opened is
    /// no open file any more: the guest gets `EBADF` for it.
    ///
    /// # Errors
    ///
    /// `EINVAL` when `saved` is not what `save` can have given.
    pub fn restore(
        &self,
        saved: &[SavedHandle],
        mut open: impl FnMut(&SavedHandle) -> Result<Descriptor, Errno>,
    ) -> Result<(), Errno> {
        let mut table = self.lock();
        for saved in saved {
            let index = saved.number as u32 as usize;
            // More open files than descriptors there cannot have been.
            if index >= MOST_HANDLES {
                return Err(Errno::INVAL);
            }
            if table.slots.len() <= index {
                table.slots.resize_with(index + 1, Slot::default);
            }
            let slot = &mut table.slots[index];
            if slot.handle.is_some() {
                return Err(Errno::INVAL);
            }
            slot.generation = (saved.number >> 32) as u32;
            slot.handle = open(saved).ok().map(|file| {
                Arc::new(Handle {
                    node: saved.node,
                    file,
                    flags: saved.flags,
                    position: Mutex::default(),
                })
            });
        }
        let last = table.slots.iter().map(|slot| slot.generation).max();
        let next = last.unwrap_or(0).wrapping_add(1);
        table.free.clear();
        for index in 0..table.slots.len() {
            if table.slots[index].handle.is_none() {
                table.slots[index].generation = next;
                table.free.push(index as u32);
            }
        }
        Ok(())
    }
}
