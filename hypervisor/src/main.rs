//! cube-hypervisor: a small virtual machine monitor on KVM for one container sandbox.

mod virtio;

fn main() {}
