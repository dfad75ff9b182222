# The bench's results as a table.
def giga: . / 1e9 * 1000 | round / 1000;
def row($name; $cube; $peer; $other): "\($name)\t\($cube | giga)\t\($peer | giga)\t\($cube / $peer * 100 | round / 100)\t\($other)";
"G instructions (median)\tcube\tpeer\tratio\tpeer is",
row("hypervisor, exec to exit"; .hypervisor.median; .qemu.median; "QEMU microvm"),
row("ctr run --rm, cold"; .run_cube.median; .run_runc.median; "runc"),
row("ctr task exec true"; .exec_cube.median; .exec_runc.median; "runc"),
"",
"exits of that boot\t\(.exits | to_entries | map("\(.key) \(.value)") | join(", "))",
"steps with cube, G\t\(.steps_cube | to_entries | map("\(.key) \(.value | giga)") | join(", "))",
"steps with runc, G\t\(.steps_runc | to_entries | map("\(.key) \(.value | giga)") | join(", "))",
"PSS, KiB\tshim \(.memory.shim), hypervisor without guest memory \(.memory.hypervisor)"
