//! Links the agent at a fixed address.
//!
//! A position-independent program applies its own relocations at each start: here tens of thousands,
//! on a hundred pages that it would otherwise share with every other process of the same file. The
//! agent runs itself once more for each container and each exec, and in its guest nobody could
//! take advantage of knowing where its code is without being in the guest's PID 1 already.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // The last of these options decides, and rustc's own `-static-pie` comes before.
    println!("cargo:rustc-link-arg-bins=-no-pie");
    println!("cargo:rustc-link-arg-bins=-static");
}
