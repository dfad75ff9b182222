//! Where, when and how soon an exec runs: its processors, its scheduler, its input and output. For a
//! container's init libcontainer does it.

use std::io;

use libcontainer::syscall::Syscall;
use libcontainer::syscall::syscall::create_syscall;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use oci_spec::runtime::{
    IOPriorityClass, LinuxSchedulerFlag, LinuxSchedulerPolicy, Process, Scheduler,
};

use super::child::ChildError;
use super::executor::in_words;

/// Keeps this process to some processors, a list like `0-2,5`.
pub fn stay_on(processors: Option<&str>) -> Result<(), ChildError> {
    let Some(list) = processors.filter(|list| !list.is_empty()) else {
        return Ok(());
    };
    let set = parse(list).ok_or_else(|| {
        ChildError::Invalid(format!(
            "process.execCPUAffinity: {list:?} is no list of processors"
        ))
    })?;
    sched_setaffinity(Pid::from_raw(0), &set).map_err(|e| {
        ChildError::Invalid(format!(
            "process.execCPUAffinity: cannot run on {list}: {}",
            in_words(&e.into())
        ))
    })
}

fn parse(list: &str) -> Option<CpuSet> {
    let mut set = CpuSet::new();
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if first > last || last >= CpuSet::count() {
            return None;
        }
        for processor in first..=last {
            set.set(processor).ok()?;
        }
    }
    Some(set)
}

/// Whether a container's init can have its scheduler, and its input and output, as it is asked for: libcontainer, which
/// sets them there, does not say of which field it speaks. It is tried on a thread, which ends with it.
pub fn try_out(process: &Process) -> Result<(), ChildError> {
    if process.io_priority().is_none() && process.scheduler().is_none() {
        return Ok(());
    }
    let attempt = || set(process, create_syscall().as_ref());
    std::thread::scope(|scope| scope.spawn(attempt).join()).unwrap_or_else(|_| {
        Err(ChildError::Failed(
            "cannot try process.scheduler and process.ioPriority out".into(),
        ))
    })
}

/// Sets `process.ioPriority` and `process.scheduler`, which takes rights that the user may not have.
pub fn set(process: &Process, syscall: &dyn Syscall) -> Result<(), ChildError> {
    if let Some(asked) = process.io_priority() {
        // linux/ioprio.h
        let class = match asked.class() {
            IOPriorityClass::IoprioClassRt => 1,
            IOPriorityClass::IoprioClassBe => 2,
            IOPriorityClass::IoprioClassIdle => 3,
        };
        syscall
            .set_io_priority(class, asked.priority())
            .map_err(|e| ChildError::failed("cannot set process.ioPriority", e))?;
    }
    match process.scheduler() {
        Some(scheduler) => schedule(scheduler).map_err(|e| {
            ChildError::Invalid(format!("cannot set process.scheduler: {}", in_words(&e)))
        }),
        None => Ok(()),
    }
}

fn schedule(asked: &Scheduler) -> io::Result<()> {
    // linux/sched.h
    let policy = match asked.policy() {
        LinuxSchedulerPolicy::SchedOther => 0,
        LinuxSchedulerPolicy::SchedFifo => 1,
        LinuxSchedulerPolicy::SchedRr => 2,
        LinuxSchedulerPolicy::SchedBatch => 3,
        LinuxSchedulerPolicy::SchedIso => 4,
        LinuxSchedulerPolicy::SchedIdle => 5,
        LinuxSchedulerPolicy::SchedDeadline => 6,
    };
    let flag = |flag: &LinuxSchedulerFlag| match flag {
        LinuxSchedulerFlag::SchedResetOnFork => 0x01,
        LinuxSchedulerFlag::SchedFlagReclaim => 0x02,
        LinuxSchedulerFlag::SchedFlagDLOverrun => 0x04,
        LinuxSchedulerFlag::SchedFlagKeepPolicy => 0x08,
        LinuxSchedulerFlag::SchedFlagKeepParams => 0x10,
        LinuxSchedulerFlag::SchedFlagUtilClampMin => 0x20,
        LinuxSchedulerFlag::SchedFlagUtilClampMax => 0x40,
    };
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: policy,
        sched_flags: asked.flags().iter().flatten().map(flag).sum(),
        sched_nice: asked.nice().unwrap_or(0),
        sched_priority: u32::try_from(asked.priority().unwrap_or(0))
            .map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))?,
        sched_runtime: asked.runtime().unwrap_or(0),
        sched_deadline: asked.deadline().unwrap_or(0),
        sched_period: asked.period().unwrap_or(0),
    };
    // SAFETY: the structure is as long as its size says, and the kernel only reads it.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    Ok(Errno::result(result).map(drop)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scheduler_that_the_kernel_does_not_take_is_refused_and_this_thread_stays_as_it_is() {
        let process = |scheduler: serde_json::Value| -> Process {
            serde_json::from_value(serde_json::json!({
                "user": {"uid": 0, "gid": 0}, "cwd": "/", "scheduler": scheduler,
            }))
            .unwrap()
        };
        try_out(&process(
            serde_json::json!({"policy": "SCHED_BATCH", "nice": 1}),
        ))
        .unwrap();
        // SAFETY: sched_getscheduler has no memory arguments.
        assert_eq!(unsafe { libc::sched_getscheduler(0) }, libc::SCHED_OTHER);
        let error = try_out(&process(serde_json::json!({"policy": "SCHED_FIFO"}))).unwrap_err();
        assert!(error.to_string().contains("process.scheduler"), "{error}");
    }

    #[test]
    fn lists_of_processors_are_read() {
        let members = |list: &str| -> Option<Vec<usize>> {
            let set = parse(list)?;
            let is_set = |n: &usize| set.is_set(*n).unwrap();
            Some((0..CpuSet::count()).filter(is_set).collect())
        };
        assert_eq!(members("0"), Some(vec![0]));
        assert_eq!(members("0-2, 5"), Some(vec![0, 1, 2, 5]));
        for bad in ["", "x", "2-1", "1-", "-1", "0,,1", "100000"] {
            assert_eq!(members(bad), None, "{bad}");
        }
    }
}
