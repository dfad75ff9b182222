//! cube-hypervisor: a small virtual machine monitor on KVM for one container sandbox.

fn main() {
    let status = cube_hypervisor::run(std::env::args_os().skip(1));
    // Not by returning: what the machine holds is given back by the host faster than by us.
    std::process::exit(status.code().into());
}
