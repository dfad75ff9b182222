//! What things cost, on a clock that may count instructions.

use std::fs;
use std::time::Instant;

/// What one of `count` things costs that `run` does, in time and in KVM's exits, where debugfs tells.
pub fn report(name: &str, count: u64, run: impl FnOnce()) {
    let before = exits();
    let start = Instant::now();
    run();
    let nanoseconds = start.elapsed().as_nanos() as u64 / count;
    print!("{name:34} {nanoseconds:>10} ns");
    for ((name, before), (_, after)) in before.into_iter().zip(exits()) {
        print!(", {name} {:.1}", (after - before) as f64 / count as f64);
    }
    println!();
}

fn exits() -> Vec<(&'static str, u64)> {
    ["exits", "mmio_exits", "halt_exits", "irq_injections"]
        .into_iter()
        .filter_map(|name| {
            let text = fs::read_to_string(format!("/sys/kernel/debug/kvm/{name}")).ok()?;
            Some((name, text.trim().parse().ok()?))
        })
        .collect()
}
