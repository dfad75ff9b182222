//! A machine that runs: its vCPUs, and the thread that serves its devices.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use cube_hypervisor_api::ExitStatus;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};

use crate::builder::Subscriber;
use crate::console::Console;
use crate::devices::Leftovers;
use crate::ending::{End, Ending};
use crate::exits::ExitTable;
use crate::slots::Slots;
use crate::vcpu::Vcpu;

/// A running machine.
pub struct Machine {
    vcpus: Arc<[Vcpu]>,
    events: EventManager<Subscriber>,
    console: Arc<Console>,
    slots: Arc<Slots>,
    leftovers: Leftovers,
}

impl Machine {
    /// A machine of running vCPUs and an event loop that knows the devices.
    pub fn new(
        vcpus: Vec<Vcpu>,
        events: EventManager<Subscriber>,
        console: Arc<Console>,
        slots: Slots,
        leftovers: Leftovers,
    ) -> Self {
        Self {
            vcpus: vcpus.into(),
            events,
            console,
            slots: Arc::new(slots),
            leftovers,
        }
    }

    /// Adds what is served beside the devices.
    pub fn add(&mut self, subscriber: Subscriber) {
        self.events.add_subscriber(subscriber);
    }

    /// The vCPUs, the one that boots first.
    pub fn vcpus(&self) -> &Arc<[Vcpu]> {
        &self.vcpus
    }

    /// What the guest says.
    pub fn console(&self) -> &Arc<Console> {
        &self.console
    }

    /// Where disks and networks can be attached.
    pub fn slots(&self) -> &Arc<Slots> {
        &self.slots
    }

    /// Serves the devices until the machine ends.
    pub fn run(&mut self, ending: &Arc<Ending>) -> Result<End, event_manager::Error> {
        let watch = EndWatch(Arc::clone(ending));
        self.add(Arc::new(Mutex::new(watch)));
        loop {
            self.events.run()?;
            if let Some(end) = ending.get() {
                self.console.finish();
                self.leftovers = Leftovers::default();
                return Ok(self.with_panic(end));
            }
        }
    }

    /// A reset after a panic is the panic's.
    fn with_panic(&self, end: End) -> End {
        match self.console.panic_message() {
            Some(cause) if end.status == ExitStatus::GuestReset => End {
                status: ExitStatus::GuestPanic,
                message: format!("The guest kernel panicked: {cause}"),
            },
            _ => end,
        }
    }

    /// The table of all vCPUs' exits: first what came out to the hypervisor, then what KVM counts.
    pub fn exit_table(&self) -> String {
        let counts: Vec<_> = self.vcpus.iter().map(Vcpu::counts).collect();
        let mut table = ExitTable(&counts).to_string();
        for (name, value) in self.kvm_counters() {
            table.push_str(&format!("\nkvm_{name} {value}"));
        }
        table
    }

    /// What KVM counts of all vCPUs together, without what is zero.
    fn kvm_counters(&self) -> BTreeMap<String, u64> {
        let mut sums = BTreeMap::new();
        for stats in self.vcpus.iter().filter_map(Vcpu::stats) {
            for (name, value) in stats.read().unwrap_or_default() {
                *sums.entry(name).or_insert(0) += value;
            }
        }
        sums.retain(|_, value| *value > 0);
        sums
    }
}

/// Makes the event loop return when the end is announced.
struct EndWatch(Arc<Ending>);

impl MutEventSubscriber for EndWatch {
    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new(self.0.event(), EventSet::IN)) {
            log::error!("Cannot watch for the end of the machine: {e}");
        }
    }

    fn process(&mut self, _: Events, _: &mut EventOps) {}
}
