//! What one round does, drawn from the seed.

use std::time::{Duration, SystemTime};

/// Who is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The shim's daemon.
    Shim,
    /// The hypervisor.
    Hypervisor,
    /// The guest: its agent is PID 1, whose end is the kernel's, which panics.
    GuestPanics,
    /// The guest, which resets as if its agent had asked for it.
    GuestResets,
    /// The container's init.
    Init,
    /// containerd, which is started again.
    Containerd,
}

/// When: while this is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Create and start.
    Start,
    /// Nothing but the container's own work.
    Run,
    /// An exec, which may have ended.
    Exec,
    /// Kill and delete.
    Delete,
}

/// A round.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Who is killed.
    pub victim: Victim,
    /// In which part of its life.
    pub moment: Moment,
    /// How far into that part, in thousandths of what it usually takes.
    pub thousandths: u32,
    /// Whether another container lives in the sandbox, which bears that one's name.
    pub group: bool,
    /// Whether the exec ends by itself at once.
    pub short_exec: bool,
}

impl Plan {
    /// The plan of one round: the same for the same seed, whatever came before.
    pub fn of(seed: u64, round: u64) -> Self {
        let mut random = Random(seed ^ round.wrapping_mul(0xd134_2543_de82_ef95));
        use Moment::{Delete, Exec, Run, Start};
        use Victim::{Containerd, GuestPanics, GuestResets, Hypervisor, Init, Shim};
        // What takes a sandbox apart is killed more often.
        let victims = [
            Shim,
            Shim,
            Hypervisor,
            Hypervisor,
            GuestPanics,
            GuestResets,
            Init,
            Containerd,
        ];
        let victim = victims[random.below(victims.len() as u32) as usize];
        let moment = [Start, Start, Run, Exec, Delete][random.below(5) as usize];
        // Only somebody in the guest can bring it down.
        let needs_group = matches!(victim, GuestPanics | GuestResets);
        Self {
            victim,
            moment,
            thousandths: random.below(1000),
            group: random.below(4) == 0 || needs_group,
            short_exec: random.below(2) == 0,
        }
    }

    /// The moment, after this part of its life has begun.
    pub fn after(&self, usual: Duration) -> Duration {
        usual * self.thousandths / 1000
    }
}

/// Numbers by the SplitMix64 algorithm (Steele, Lea, Flood 2014), each from a 64-bit state.
pub struct Random(u64);

impl Random {
    /// A seed that nobody has chosen.
    pub fn seed() -> u64 {
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap();
        // Six digits are easier to type again.
        Self(now.as_nanos() as u64).next() % 1_000_000
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u32) -> u32 {
        (self.next() % u64::from(limit)) as u32
    }
}
