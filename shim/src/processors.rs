//! The host's processors that containers are bound to, and the vCPUs that stand for them.
//!
//! A specification counts processors as the host does, and the guest has its own numbers. So each of the host's that a
//! container names gets a vCPU, whose thread may run there alone, and the container is bound to the vCPUs of its
//! processors in the guest.

use std::collections::{BTreeMap, BTreeSet};

/// Why a list of processors cannot be had.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ProcessorsError {
    /// It is none.
    #[error("linux.resources.cpu.cpus is not a list of processors such as \"0-2,5\": {0:?}")]
    List(String),
    /// The host does not have it.
    #[error(
        "linux.resources.cpu.cpus names processor {0}, which the host does not have: it has {1}"
    )]
    Missing(u32, String),
}

/// A list of processors, cpuset(7), "List format", without strides.
pub fn parse(list: &str) -> Result<BTreeSet<u32>, ProcessorsError> {
    /// More than any kernel has (`NR_CPUS` of Kconfig), so that a long range costs nothing.
    const MOST: u32 = 8192;
    let malformed = || ProcessorsError::List(list.to_owned());
    let number = |text: &str| text.trim().parse::<u32>().ok().filter(|cpu| *cpu < MOST);
    let mut cpus = BTreeSet::new();
    for part in list.trim().split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let range = number(first).zip(number(last)).filter(|(f, l)| f <= l);
        let (first, last) = range.ok_or_else(malformed)?;
        cpus.extend(first..=last);
    }
    Ok(cpus)
}

/// The list as the kernel reads it.
fn write<T: ToString>(cpus: impl IntoIterator<Item = T>) -> String {
    let cpus: Vec<_> = cpus.into_iter().map(|cpu| cpu.to_string()).collect();
    cpus.join(",")
}

/// Which vCPU stands for which processor.
#[derive(Debug)]
pub struct Processors {
    vcpus: u8,
    /// Those of each container that names some.
    named: BTreeMap<String, BTreeSet<u32>>,
    vcpu_of: BTreeMap<u32, u8>,
}

impl Processors {
    /// Of a machine with so many vCPUs.
    pub fn new(vcpus: u8) -> Self {
        Self {
            vcpus: vcpus.max(1),
            named: BTreeMap::new(),
            vcpu_of: BTreeMap::new(),
        }
    }

    /// Binds a container to processors, whatever it was bound to before; the list for the guest.
    pub fn bind(&mut self, container: &str, cpus: BTreeSet<u32>) -> String {
        self.release(container);
        for &cpu in &cpus {
            if !self.vcpu_of.contains_key(&cpu) {
                let vcpu = self.vcpu_for(cpu);
                self.vcpu_of.insert(cpu, vcpu);
            }
        }
        let vcpus: BTreeSet<_> = cpus
            .iter()
            .filter_map(|cpu| self.vcpu_of.get(cpu))
            .collect();
        let list = write(vcpus);
        self.named.insert(container.to_owned(), cpus);
        list
    }

    /// The one of the same number if it stands for no other yet, else one that stands for the fewest.
    fn vcpu_for(&self, cpu: u32) -> u8 {
        let load = |vcpu: u8| self.vcpu_of.values().filter(|v| **v == vcpu).count();
        let same = u8::try_from(cpu).ok().filter(|v| *v < self.vcpus);
        let same = same.filter(|vcpu| load(*vcpu) == 0);
        same.or_else(|| (0..self.vcpus).min_by_key(|vcpu| load(*vcpu)))
            .unwrap_or_default()
    }

    /// Forgets a container; what it was bound to.
    pub fn release(&mut self, container: &str) -> Option<BTreeSet<u32>> {
        let released = self.named.remove(container)?;
        let named: BTreeSet<_> = self.named.values().flatten().copied().collect();
        self.vcpu_of.retain(|cpu, _| named.contains(cpu));
        Some(released)
    }

    /// The processors that each vCPU's thread is to run on; none where it may run anywhere.
    pub fn threads(&self) -> Vec<BTreeSet<u32>> {
        let of = |vcpu: u8| {
            let cpus = self.vcpu_of.iter().filter(|(_, v)| **v == vcpu);
            cpus.map(|(cpu, _)| *cpu).collect()
        };
        (0..self.vcpus).map(of).collect()
    }
}

/// Looks whether the host has all of these; `online` is its own list.
pub fn check(cpus: &BTreeSet<u32>, online: &str) -> Result<(), ProcessorsError> {
    let there = parse(online)?;
    match cpus.difference(&there).next() {
        Some(missing) => Err(ProcessorsError::Missing(*missing, online.trim().to_owned())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cpus(list: &str) -> BTreeSet<u32> {
        parse(list).unwrap()
    }

    #[test]
    fn lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(cpus("0-2,5\n"), [0, 1, 2, 5].into());
        for bad in [
            "",
            "x",
            "1-",
            "3-1",
            "1,,2",
            "-1",
            "0-99999999",
            "9999999999999",
        ] {
            let error = parse(bad).unwrap_err().to_string();
            assert!(error.contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn processors_have_the_vcpus_of_their_numbers_or_free_ones() {
        let mut all = Processors::new(4);
        assert_eq!(all.bind("a", cpus("1")), "1");
        assert_eq!(all.bind("b", cpus("4-5")), "0,2");
        assert_eq!(all.bind("c", cpus("6-7")), "0,3");
        // The vCPU is the same for two containers that name the same processor.
        assert_eq!(all.bind("d", cpus("5")), "2");
        assert_eq!(
            all.threads(),
            [cpus("4,7"), cpus("1"), cpus("5"), cpus("6")]
        );
        for container in ["a", "b", "c"] {
            all.release(container);
        }
        assert_eq!(all.threads()[2], cpus("5"));
        all.release("d");
        assert!(all.threads().iter().all(BTreeSet::is_empty));
    }

    #[test]
    fn what_the_host_does_not_have_is_named() {
        let error = check(&cpus("1,40"), "0-1\n").unwrap_err().to_string();
        assert!(
            error.contains("processor 40") && error.ends_with("it has 0-1"),
            "{error}"
        );
        check(&cpus("0-1"), "0-1").unwrap();
    }

    proptest! {
        #[test]
        fn every_processor_that_is_named_has_one_vcpu_and_no_other(
            steps in proptest::collection::vec((0u8..4, proptest::collection::btree_set(0u32..16, 0..6)), 1..20),
            vcpus in 1u8..6,
        ) {
            let mut all = Processors::new(vcpus);
            for (container, cpus) in steps {
                let list = all.bind(&container.to_string(), cpus.clone());
                let bound = if cpus.is_empty() { BTreeSet::new() } else { parse(&list).unwrap() };
                prop_assert!(bound.len() <= cpus.len() && (bound.is_empty() == cpus.is_empty()));
                let threads = all.threads();
                for cpu in &cpus {
                    let with: Vec<_> = (0..).zip(&threads).filter(|(_, t)| t.contains(cpu)).collect();
                    prop_assert_eq!(with.len(), 1);
                    prop_assert!(bound.contains(&with[0].0));
                }
            }
        }
    }
}
