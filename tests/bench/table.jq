# The bench's results as a table.
def giga: . / 1e9 * 1000 | round / 1000;
def row($name; $cube; $peer; $other): "\($name)\t\($cube | giga)\t\($peer | giga)\t\($cube / $peer * 100 | round / 100)\t\($other)";
def list(f): to_entries | map("\(.key) \(.value | f)") | join(", ");
"G instructions (median)\tcube\tpeer\tratio\tpeer is",
row("hypervisor, exec to exit"; .hypervisor.median; .qemu.median; "QEMU microvm"),
"hypervisor, exec to agent ready\t\(.ready.median | giga)",
"  with 1 and 4 empty slots for disks\t\(.ready_with_1.median | giga)\t\(.ready_with_4.median | giga)",
row("ctr run --rm, cold"; .run_cube.median; .run_runc.median; "runc"),
row("ctr task exec true"; .exec_cube.median; .exec_runc.median; "runc"),
"ctr alone (ctr version)\t\(.ctr_alone.median | giga)",
"",
"exits of that boot\t\(.exits | list(.))",
"steps with cube, G since the client's start\n\(.steps_cube | to_entries | map("  \(.value | giga)\t\(.key)") | join("\n"))",
"steps with runc\n\(.steps_runc | to_entries | map("  \(.value | giga)\t\(.key)") | join("\n"))",
"PSS idle, KiB\tshim \(.memory.idle.shim), hypervisor without guest memory \(.memory.idle.hypervisor)",
"PSS after load\tshim \(.memory.loaded.shim), hypervisor without guest memory \(.memory.loaded.hypervisor)",
"most the shim had\t\(.memory.shim_most)"
