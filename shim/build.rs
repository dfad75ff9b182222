//! Generates the messages of a pod's configuration from the .proto file, without protoc.

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=proto/cri.proto");
    let out = std::env::var("OUT_DIR").map_err(std::io::Error::other)?;
    // There is no service in it: what this makes beside the messages is empty.
    ttrpc_codegen::Codegen::new()
        .out_dir(&out)
        .input("proto/cri.proto")
        .include("proto")
        .rust_protobuf()
        .run()
}
