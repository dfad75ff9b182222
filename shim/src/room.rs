//! What a machine has for its containers, and what each of them is to have of it.

use std::collections::BTreeSet;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use serde_json::Value;

use crate::processors::{self, Processors, ProcessorsError};
use crate::sizing::Size;

/// What a container asks for that the machine cannot give.
#[derive(Debug, thiserror::Error)]
pub enum RoomError {
    /// More memory than there is.
    #[error(
        "linux.resources.memory.limit is {0} bytes, more than the {1} MiB of the sandbox's VM: ask for it with the sandbox or its first container, or set default_memory_mib higher for new sandboxes"
    )]
    Memory(i64, u64),
    /// More processor time than there is.
    #[error(
        "linux.resources.cpu.quota is worth {0} processors, more than the {1} of the sandbox's VM: ask for them with the sandbox or its first container, or set default_vcpus higher for new sandboxes"
    )]
    Cpus(u64, u8),
    /// Processors by their numbers.
    #[error(transparent)]
    Processors(#[from] ProcessorsError),
    /// The host's processors are not known.
    #[error("Cannot read which processors the host has: {0}")]
    Online(#[source] io::Error),
    /// A vCPU cannot be bound to its processors.
    #[error(
        "Cannot bind the VM's {0} to the host's processors {1:?} (linux.resources.cpu.cpus): {2}"
    )]
    Pin(String, BTreeSet<u32>, nix::Error),
    /// The vCPUs' threads are not found.
    #[error("Cannot find the threads of process {0}: {1}")]
    Threads(u32, #[source] io::Error),
}

/// A machine's room.
pub struct Room {
    size: Size,
    /// The most that any machine may have: what is beyond is no limit at all (see [`Size`]).
    most: Size,
    binding: Mutex<Binding>,
}

struct Binding {
    processors: Processors,
    /// What the vCPUs' threads are bound to now.
    threads: Vec<BTreeSet<u32>>,
}

impl Room {
    /// The room of a machine of this size, where `most` is the largest that there may be.
    pub fn new(size: Size, most: Size) -> Self {
        let processors = Processors::new(size.vcpus);
        let threads = processors.threads();
        Self {
            size,
            most,
            binding: Mutex::new(Binding {
                processors,
                threads,
            }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Binding> {
        self.binding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks whether the limits in `resources` (an OCI `LinuxResources`) are within the machine.
    pub fn check(&self, resources: &Value) -> Result<(), RoomError> {
        if let Some(limit) = resources.pointer("/memory/limit").and_then(Value::as_i64) {
            let mib = u64::try_from(limit).unwrap_or(0).div_ceil(1 << 20);
            if (self.size.memory_mib + 1..=self.most.memory_mib).contains(&mib) {
                return Err(RoomError::Memory(limit, self.size.memory_mib));
            }
        }
        let cpu = |name: &str| resources.get("cpu")?.get(name);
        if let Some(wanted) = crate::sizing::processors_of(
            cpu("quota").and_then(Value::as_i64),
            cpu("period").and_then(Value::as_i64),
        ) && (u64::from(self.size.vcpus) + 1..=u64::from(self.most.vcpus)).contains(&wanted)
        {
            return Err(RoomError::Cpus(wanted, self.size.vcpus));
        }
        Ok(())
    }

    /// Binds a container to the processors in `resources`, and writes there what the guest calls them. Returns those that
    /// it was bound to before. [`Self::pin`] is to follow.
    pub fn bind(
        &self,
        container: &str,
        resources: &mut Value,
    ) -> Result<Option<BTreeSet<u32>>, RoomError> {
        let list = resources.pointer_mut("/cpu/cpus");
        let Some(list) = list.filter(|list| list.as_str().is_some_and(|list| !list.is_empty()))
        else {
            return Ok(None);
        };
        let cpus = processors::parse(list.as_str().unwrap_or_default())?;
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
        processors::check(&cpus, &online.map_err(RoomError::Online)?)?;
        let mut binding = self.lock();
        let before = binding.processors.release(container);
        *list = binding.processors.bind(container, cpus).into();
        Ok(before)
    }

    /// Binds a container to the processors that it was bound to before.
    pub fn bind_again(&self, container: &str, before: Option<BTreeSet<u32>>) {
        let mut binding = self.lock();
        binding.processors.release(container);
        if let Some(before) = before {
            binding.processors.bind(container, before);
        }
    }

    /// Binds the vCPUs' threads of the hypervisor's process as the containers want it, where that has changed.
    pub fn pin(&self, pid: u32) -> Result<(), RoomError> {
        let mut binding = self.lock();
        let wanted = binding.processors.threads();
        if wanted == binding.threads {
            return Ok(());
        }
        for (vcpu, (cpus, _)) in (wanted.iter().zip(&binding.threads).enumerate())
            .filter(|(_, (wanted, now))| wanted != now)
        {
            let name = format!("vcpu{vcpu}");
            let thread = thread_of(pid, &name).map_err(|e| RoomError::Threads(pid, e))?;
            bind_thread(thread, cpus).map_err(|e| RoomError::Pin(name, cpus.clone(), e))?;
        }
        binding.threads = wanted;
        Ok(())
    }
}

/// The thread of this name.
fn thread_of(pid: u32, name: &str) -> io::Result<Pid> {
    for thread in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        let thread = thread?;
        let id = thread.file_name().to_string_lossy().parse();
        let comm = std::fs::read_to_string(thread.path().join("comm"));
        if let (Ok(id), Ok(comm)) = (id, comm)
            && comm.trim_end() == name
        {
            return Ok(Pid::from_raw(id));
        }
    }
    Err(io::Error::new(io::ErrorKind::NotFound, name.to_owned()))
}

/// Binds a thread to these processors; to all that its cgroup allows if there are none.
fn bind_thread(thread: Pid, cpus: &BTreeSet<u32>) -> nix::Result<()> {
    let mut set = CpuSet::new();
    if cpus.is_empty() {
        for cpu in 0..CpuSet::count() {
            set.set(cpu)?;
        }
    }
    for &cpu in cpus {
        set.set(cpu as usize)?;
    }
    sched_setaffinity(thread, &set)
}

#[cfg(test)]
mod tests {
    use nix::sched::sched_getaffinity;
    use serde_json::json;

    use super::*;

    fn room() -> Room {
        let size = |vcpus, memory_mib| Size { vcpus, memory_mib };
        Room::new(size(2, 320), size(8, 4096))
    }

    #[test]
    fn limits_beyond_the_machine_are_refused_unless_they_mean_none() {
        for (resources, word) in [
            (json!({"memory": {"limit": 320 << 20}}), ""),
            (json!({"memory": {"limit": (320 << 20) + 1}}), "320 MiB"),
            (json!({"memory": {"limit": i64::MAX}}), ""),
            (json!({"memory": {"limit": -1}}), ""),
            (json!({"cpu": {"quota": 200_000, "period": 100_000}}), ""),
            (json!({"cpu": {"quota": 200_001}}), "3 processors"),
            (json!({"cpu": {"quota": -1, "period": 100_000}}), ""),
            (json!({"cpu": {"quota": 900_000_000}}), ""),
            (json!({}), ""),
        ] {
            match room().check(&resources) {
                Ok(()) => assert_eq!(word, "", "{resources}"),
                Err(error) => {
                    let error = error.to_string();
                    assert!(!word.is_empty() && error.contains(word), "{error}");
                }
            }
        }
    }

    #[test]
    fn the_thread_of_a_vcpu_runs_where_its_containers_want_it() {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let vcpu = std::thread::Builder::new().name("vcpu0".into());
        let vcpu = vcpu.spawn(move || {
            tell.send(nix::unistd::gettid()).unwrap();
            let _ = ended.recv();
        });
        let thread = told.recv().unwrap();
        let allowed = |cpu: usize| sched_getaffinity(thread).unwrap().is_set(cpu).unwrap();
        let all = sched_getaffinity(thread).unwrap();
        let room = room();
        let pid = std::process::id();
        room.pin(pid).unwrap();
        let first = (0..CpuSet::count()).find(|cpu| all.is_set(*cpu).unwrap());
        let first = first.unwrap();

        let mut resources = json!({"cpu": {"cpus": first.to_string()}});
        assert_eq!(room.bind("c", &mut resources).unwrap(), None);
        room.pin(pid).unwrap();
        assert!((0..CpuSet::count()).all(|cpu| allowed(cpu) == (cpu == first)));
        // An update that the guest does not take changes nothing.
        let mut resources = json!({"cpu": {"cpus": first.to_string()}});
        let before = room.bind("c", &mut resources).unwrap();
        assert_eq!(before, Some([first as u32].into()));
        room.bind_again("c", before);
        room.pin(pid).unwrap();
        assert!(allowed(first));

        room.bind_again("c", None);
        room.pin(pid).unwrap();
        // All that there are, also where the test itself is bound to some of them.
        assert!((0..CpuSet::count()).all(|cpu| allowed(cpu) || !all.is_set(cpu).unwrap()));
        drop(end);
        vcpu.unwrap().join().unwrap();
    }

    #[test]
    fn what_is_not_there_is_refused_before_anything_is_bound() {
        let room = room();
        for list in ["8000", "x"] {
            let mut resources = json!({"cpu": {"cpus": list}});
            let error = room.bind("c", &mut resources).unwrap_err().to_string();
            assert!(error.contains("linux.resources.cpu.cpus"), "{error}");
            assert_eq!(resources["cpu"]["cpus"], list);
        }
        let mut none = json!({"cpu": {"cpus": ""}});
        assert_eq!(room.bind("c", &mut none).unwrap(), None);
        room.pin(0).unwrap();
    }
}
