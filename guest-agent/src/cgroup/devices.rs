//! Which devices a container may use: a small BPF program on its cgroup.
//!
//! cgroup v2 has no file for devices; the kernel asks a program of type BPF_PROG_TYPE_CGROUP_DEVICE
//! at each open and mknod (include/uapi/linux/bpf.h, struct bpf_cgroup_dev_ctx). The rules come in
//! the order of cgroup v1, where a later one overrides an earlier one: the program asks from the last
//! to the first.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::path::Path;

use oci_spec::runtime::{LinuxDeviceCgroup, LinuxDeviceType};

use super::{CgroupError, Result};

/// A rule, with the kernel's numbers; none stands for any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    allow: bool,
    /// BPF_DEVCG_DEV_BLOCK or BPF_DEVCG_DEV_CHAR.
    kind: Option<i32>,
    major: Option<i32>,
    minor: Option<i32>,
    /// BPF_DEVCG_ACC_* bits.
    access: i32,
}

const BLOCK: i32 = 1;
const CHAR: i32 = 2;
const MKNOD: i32 = 1;
const READ: i32 = 2;
const WRITE: i32 = 4;
const ALL: i32 = MKNOD | READ | WRITE;

/// What every container may use, whatever its rules say (runtime-spec, "Default Devices"): null,
/// zero, full, random, urandom, tty, console, ptmx and the terminals; and it may make any node. As with runc, it may use
/// /dev/net/tun, too: clients that cannot ask for it have always counted on that.
const DEFAULTS: [Rule; 12] = [
    rule(BLOCK, None, None, MKNOD),
    rule(CHAR, None, None, MKNOD),
    rule(CHAR, Some(1), Some(3), ALL),
    rule(CHAR, Some(1), Some(5), ALL),
    rule(CHAR, Some(1), Some(7), ALL),
    rule(CHAR, Some(1), Some(8), ALL),
    rule(CHAR, Some(1), Some(9), ALL),
    rule(CHAR, Some(5), Some(0), ALL),
    rule(CHAR, Some(5), Some(1), ALL),
    rule(CHAR, Some(5), Some(2), ALL),
    rule(CHAR, Some(10), Some(200), ALL),
    rule(CHAR, Some(136), None, ALL),
];

const fn rule(kind: i32, major: Option<i32>, minor: Option<i32>, access: i32) -> Rule {
    Rule {
        allow: true,
        kind: Some(kind),
        major,
        minor,
        access,
    }
}

/// Restricts the cgroup at `dir` to these rules, in place of earlier ones.
pub fn restrict(dir: &Path, rules: &[LinuxDeviceCgroup]) -> Result<()> {
    let mut all = Vec::with_capacity(rules.len() + DEFAULTS.len());
    for rule in rules {
        all.extend(translate(rule)?);
    }
    // A privileged container: the kernel need not ask.
    let open = all.last().is_some_and(allows_everything);
    all.extend(DEFAULTS);
    let restrict = || -> io::Result<()> {
        let cgroup = File::open(dir)?;
        let earlier = attached(&cgroup)?;
        if !open {
            attach(&cgroup, &load(&compile(&all))?)?;
        }
        // All programs of a cgroup must agree: without the earlier ones the new one alone counts.
        for id in earlier {
            detach(&cgroup, &program_with(id)?)?;
        }
        Ok(())
    };
    restrict().map_err(CgroupError::Devices)
}

fn allows_everything(rule: &Rule) -> bool {
    rule.allow
        && rule.kind.is_none()
        && rule.major.is_none()
        && rule.minor.is_none()
        && rule.access == ALL
}

fn translate(rule: &LinuxDeviceCgroup) -> Result<Option<Rule>> {
    let invalid = |what: String| CgroupError::Invalid("linux.resources.devices", what);
    let kind = match rule.typ() {
        None | Some(LinuxDeviceType::A) => None,
        Some(LinuxDeviceType::B) => Some(BLOCK),
        Some(LinuxDeviceType::C | LinuxDeviceType::U) => Some(CHAR),
        // A FIFO is no device.
        Some(LinuxDeviceType::P) => return Ok(None),
    };
    // -1 is any.
    let number = |n: Option<i64>| match n {
        None | Some(-1) => Ok(None),
        Some(n) => i32::try_from(n)
            .ok()
            .filter(|n| *n >= 0)
            .map(Some)
            .ok_or_else(|| invalid(format!("device number {n}"))),
    };
    let mut access = 0;
    for letter in rule.access().as_deref().unwrap_or("rwm").chars() {
        access |= match letter {
            'r' => READ,
            'w' => WRITE,
            'm' => MKNOD,
            other => return Err(invalid(format!("access {other:?}"))),
        };
    }
    Ok(Some(Rule {
        allow: rule.allow(),
        kind,
        major: number(rule.major())?,
        minor: number(rule.minor())?,
        access,
    }))
}

/// An instruction (Documentation/bpf/instruction-set.rst): opcode, registers, offset, immediate.
type Instruction = u64;

const fn instruction(opcode: u8, dst: u8, src: u8, offset: i16, immediate: i32) -> Instruction {
    opcode as u64
        | ((src << 4 | dst) as u64) << 8
        | (offset as u16 as u64) << 16
        | (immediate as u32 as u64) << 32
}

// Opcodes of the classes LDX, ALU and JMP; jumps compare with the immediate or a register.
const LOAD_WORD: u8 = 0x61;
const AND_IMMEDIATE: u8 = 0x54;
const SHIFT_RIGHT: u8 = 0x74;
const MOVE_REGISTER: u8 = 0xbc;
const MOVE_IMMEDIATE: u8 = 0xb7;
const JUMP_EQUAL: u8 = 0x15;
const JUMP_NOT_EQUAL: u8 = 0x55;
const JUMP_NOT_EQUAL_REGISTER: u8 = 0x5d;
const EXIT: u8 = 0x95;

/// r2 is the kind, r3 the access, r4 and r5 the numbers. A rule counts when it covers all of the
/// access that is asked for; when none does the answer is no.
fn compile(rules: &[Rule]) -> Vec<Instruction> {
    let mut program = vec![
        // access_type is kind in the low half and access in the high half.
        instruction(LOAD_WORD, 2, 1, 0, 0),
        instruction(AND_IMMEDIATE, 2, 0, 0, 0xffff),
        instruction(LOAD_WORD, 3, 1, 0, 0),
        instruction(SHIFT_RIGHT, 3, 0, 0, 16),
        instruction(LOAD_WORD, 4, 1, 4, 0),
        instruction(LOAD_WORD, 5, 1, 8, 0),
    ];
    for rule in rules.iter().rev() {
        let always = rule.kind.is_none()
            && rule.access == ALL
            && rule.major.is_none()
            && rule.minor.is_none();
        // From each test a jump leads behind the rule; how far is known when it is complete.
        let mut tests = Vec::new();
        if let Some(kind) = rule.kind {
            tests.push(instruction(JUMP_NOT_EQUAL, 2, 0, 0, kind));
        }
        if rule.access != ALL {
            tests.push(instruction(MOVE_REGISTER, 1, 3, 0, 0));
            if rule.allow {
                // Covered: nothing is left of the access without the rule's bits.
                tests.push(instruction(AND_IMMEDIATE, 1, 0, 0, rule.access));
                tests.push(instruction(JUMP_NOT_EQUAL_REGISTER, 1, 3, 0, 0));
            } else {
                // A denial counts as soon as one of its bits is asked for.
                tests.push(instruction(AND_IMMEDIATE, 1, 0, 0, rule.access));
                tests.push(instruction(JUMP_EQUAL, 1, 0, 0, 0));
            }
        }
        if let Some(major) = rule.major {
            tests.push(instruction(JUMP_NOT_EQUAL, 4, 0, 0, major));
        }
        if let Some(minor) = rule.minor {
            tests.push(instruction(JUMP_NOT_EQUAL, 5, 0, 0, minor));
        }
        let end = tests.len() + 2;
        for (at, test) in tests.iter_mut().enumerate() {
            let jumps = *test as u8 & 0x07 == 0x05;
            if jumps {
                *test |= ((end - at - 1) as u64) << 16;
            }
        }
        program.append(&mut tests);
        program.push(instruction(MOVE_IMMEDIATE, 0, 0, 0, rule.allow.into()));
        program.push(instruction(EXIT, 0, 0, 0, 0));
        if always {
            // The kernel refuses instructions that are never reached.
            return program;
        }
    }
    program.push(instruction(MOVE_IMMEDIATE, 0, 0, 0, 0));
    program.push(instruction(EXIT, 0, 0, 0, 0));
    program
}

/// The part of union bpf_attr that BPF_PROG_LOAD needs.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct LoadAttributes {
    kind: u32,
    instructions: u32,
    program: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
}

/// The part of union bpf_attr that BPF_PROG_ATTACH needs.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AttachAttributes {
    target: u32,
    program: u32,
    attach_type: u32,
    flags: u32,
}

/// The part of union bpf_attr that BPF_PROG_QUERY needs.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct QueryAttributes {
    target: u32,
    attach_type: u32,
    query_flags: u32,
    attach_flags: u32,
    ids: u64,
    count: u32,
    padding: u32,
}

/// The part of union bpf_attr that BPF_PROG_GET_FD_BY_ID needs.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct IdAttributes {
    id: u32,
    next_id: u32,
    open_flags: u32,
}

const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_ATTACH: libc::c_long = 8;
const BPF_PROG_DETACH: libc::c_long = 9;
const BPF_PROG_GET_FD_BY_ID: libc::c_long = 13;
const BPF_PROG_QUERY: libc::c_long = 16;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
const BPF_F_ALLOW_MULTI: u32 = 2;

fn load(program: &[Instruction]) -> io::Result<OwnedFd> {
    let attributes = LoadAttributes {
        kind: BPF_PROG_TYPE_CGROUP_DEVICE,
        instructions: program.len() as u32,
        program: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        ..Default::default()
    };
    let fd = bpf(BPF_PROG_LOAD, &attributes)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn attach(cgroup: &impl AsFd, program: &OwnedFd) -> io::Result<()> {
    let attributes = AttachAttributes {
        target: cgroup.as_fd().as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        attach_type: BPF_CGROUP_DEVICE,
        flags: BPF_F_ALLOW_MULTI,
    };
    bpf(BPF_PROG_ATTACH, &attributes).map(drop)
}

fn detach(cgroup: &impl AsFd, program: &OwnedFd) -> io::Result<()> {
    let attributes = AttachAttributes {
        target: cgroup.as_fd().as_raw_fd() as u32,
        program: program.as_raw_fd() as u32,
        attach_type: BPF_CGROUP_DEVICE,
        flags: 0,
    };
    bpf(BPF_PROG_DETACH, &attributes).map(drop)
}

/// The ids of the cgroup's own programs. Only the agent attaches any, one at a time.
fn attached(cgroup: &impl AsFd) -> io::Result<Vec<u32>> {
    let mut ids = [0_u32; 8];
    let mut attributes = QueryAttributes {
        target: cgroup.as_fd().as_raw_fd() as u32,
        attach_type: BPF_CGROUP_DEVICE,
        ids: ids.as_mut_ptr() as u64,
        count: ids.len() as u32,
        ..Default::default()
    };
    bpf_mut(BPF_PROG_QUERY, &mut attributes)?;
    Ok(ids.into_iter().take(attributes.count as usize).collect())
}

fn program_with(id: u32) -> io::Result<OwnedFd> {
    let attributes = IdAttributes {
        id,
        ..Default::default()
    };
    let fd = bpf(BPF_PROG_GET_FD_BY_ID, &attributes)?;
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

fn bpf<T: Copy>(command: libc::c_long, attributes: &T) -> io::Result<i32> {
    bpf_mut(command, &mut { *attributes })
}

fn bpf_mut<T>(command: libc::c_long, attributes: &mut T) -> io::Result<i32> {
    // SAFETY: the pointer and the size describe `attributes`, whose own pointers its maker keeps
    // alive; all these structures are plain integers without hidden padding.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attributes),
            size_of::<T>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result as i32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(json: serde_json::Value) -> Vec<Rule> {
        let rules: Vec<LinuxDeviceCgroup> = serde_json::from_value(json).unwrap();
        rules
            .iter()
            .filter_map(|rule| translate(rule).unwrap())
            .collect()
    }

    /// What the kernel does with a program: the answer to an access.
    fn answer(program: &[Instruction], kind: i32, access: i32, major: i32, minor: i32) -> u64 {
        let mut registers = [0_u64; 11];
        let mut at = 0;
        loop {
            let word = program[at];
            let (opcode, dst, src) = (
                word as u8,
                (word >> 8 & 15) as usize,
                (word >> 12 & 15) as usize,
            );
            let (offset, immediate) = ((word >> 16) as i16, (word >> 32) as u32);
            at += 1;
            let jump = match opcode {
                LOAD_WORD => {
                    let context = [(access << 16 | kind) as u64, major as u64, minor as u64];
                    registers[dst] = context[offset as usize / 4];
                    false
                }
                AND_IMMEDIATE => {
                    registers[dst] &= u64::from(immediate);
                    false
                }
                SHIFT_RIGHT => {
                    registers[dst] >>= immediate;
                    false
                }
                MOVE_REGISTER => {
                    registers[dst] = registers[src];
                    false
                }
                MOVE_IMMEDIATE => {
                    registers[dst] = u64::from(immediate);
                    false
                }
                JUMP_EQUAL => registers[dst] == u64::from(immediate),
                JUMP_NOT_EQUAL => registers[dst] != u64::from(immediate),
                JUMP_NOT_EQUAL_REGISTER => registers[dst] != registers[src],
                EXIT => return registers[0],
                other => panic!("opcode {other:#x}"),
            };
            if jump {
                at += offset as usize;
            }
        }
    }

    #[test]
    fn the_last_rule_that_fits_decides() {
        let mut all = rules(serde_json::json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 229, "access": "rw"},
            {"allow": true, "type": "b", "major": 254, "access": "rwm"},
            {"allow": false, "type": "b", "major": 254, "minor": 3, "access": "w"}
        ]));
        let program = compile(&all);
        assert_eq!(answer(&program, CHAR, READ | WRITE, 10, 229), 1);
        assert_eq!(answer(&program, CHAR, READ, 10, 229), 1);
        assert_eq!(answer(&program, CHAR, READ | MKNOD, 10, 229), 0);
        assert_eq!(answer(&program, BLOCK, READ, 10, 229), 0);
        assert_eq!(answer(&program, BLOCK, WRITE, 254, 2), 1);
        assert_eq!(answer(&program, BLOCK, WRITE, 254, 3), 0);
        assert_eq!(answer(&program, BLOCK, READ, 254, 3), 1);
        assert_eq!(answer(&program, CHAR, READ, 1, 3), 0);
        all.extend(DEFAULTS);
        let program = compile(&all);
        assert_eq!(answer(&program, CHAR, ALL, 1, 3), 1);
        assert_eq!(answer(&program, CHAR, READ, 1, 11), 0);
        assert_eq!(answer(&program, CHAR, MKNOD, 1, 11), 1);
        assert_eq!(answer(&program, CHAR, READ | WRITE, 136, 7), 1);
        assert_eq!(answer(&program, CHAR, READ | WRITE, 10, 200), 1);
    }

    #[test]
    fn nothing_follows_a_rule_for_everything() {
        let program = compile(&rules(
            serde_json::json!([{"allow": false, "access": "rwm"}]),
        ));
        // Six to load, two to answer: the kernel refuses what is never reached.
        assert_eq!(program.len(), 8);
        assert_eq!(answer(&program, CHAR, READ, 1, 3), 0);
    }

    #[test]
    fn strange_rules_are_refused() {
        for json in [
            serde_json::json!({"allow": true, "access": "x"}),
            serde_json::json!({"allow": true, "major": -2, "access": "r"}),
            serde_json::json!({"allow": true, "major": 5_000_000_000_i64, "access": "r"}),
        ] {
            let rule: LinuxDeviceCgroup = serde_json::from_value(json).unwrap();
            assert!(translate(&rule).unwrap_err().is_invalid());
        }
    }
}
