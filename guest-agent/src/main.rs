//! The agent's binary: PID 1 of the guest, or one of its helpers.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    match arguments.next().as_deref() {
        Some(cube_agent::helper::HELPER_NAME) => cube_agent::helper::child::main(arguments),
        _ if std::process::id() == 1 => cube_agent::init::main(),
        _ => {
            eprintln!("cube-agent is the init of a microVM; it does nothing in another place");
            ExitCode::FAILURE
        }
    }
}
