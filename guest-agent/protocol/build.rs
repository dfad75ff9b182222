//! Generates the messages and the ttrpc service from the .proto file, without protoc.

use std::path::PathBuf;

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=proto/agent.proto");
    let out = PathBuf::from(std::env::var("OUT_DIR").map_err(std::io::Error::other)?);
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .input("proto/agent.proto")
        .include("proto")
        .rust_protobuf()
        .customize(ttrpc_codegen::Customize {
            async_all: true,
            ..Default::default()
        })
        .run()?;
    // Each of the two generators writes a mod.rs that knows only its own file.
    std::fs::write(
        out.join("protocol.rs"),
        "pub mod agent;\npub mod agent_ttrpc;\n",
    )
}
