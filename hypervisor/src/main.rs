//! cube-hypervisor: a small virtual machine monitor on KVM for one container sandbox.

mod console;
mod serial;
mod virtio;

fn main() {}
