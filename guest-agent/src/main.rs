//! The agent's binary: PID 1 of the guest, or one of its helpers.

use std::process::ExitCode;

use cube_agent::helper::id_map;

fn main() -> ExitCode {
    let mut arguments = std::env::args();
    let name = arguments.next().unwrap_or_default();
    if let Some(map) = id_map::file_of(&name) {
        return id_map::main(map, arguments);
    }
    match name.as_str() {
        cube_agent::helper::HELPER_NAME => cube_agent::helper::child::main(arguments),
        _ if std::process::id() == 1 => cube_agent::init::main(),
        _ => {
            eprintln!("cube-agent is the init of a microVM; it does nothing in another place");
            ExitCode::FAILURE
        }
    }
}
