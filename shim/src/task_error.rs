//! Why a task call failed, with the status code that containerd's clients look at.

use ttrpc::Code;

use crate::guest::GuestError;

/// A failed call.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// No such container or exec, or no running process to signal.
    #[error("{0}: not found")]
    NotFound(String),
    /// The name is taken.
    #[error("{0}: already exists")]
    AlreadyExists(String),
    /// The process or container is in a state that does not allow the call.
    #[error("{0}: failed precondition")]
    FailedPrecondition(String),
    /// The request cannot be carried out as it is.
    #[error("{0}: invalid argument")]
    InvalidArgument(String),
    /// Not served.
    #[error("{0}: not implemented")]
    Unimplemented(String),
    /// The guest refused or is gone.
    #[error("{context}{source}")]
    Guest {
        /// What was being done; empty or ends with ": ".
        context: &'static str,
        /// What came back.
        source: GuestError,
    },
    /// The host failed.
    #[error("{0}")]
    Host(String),
}

impl TaskError {
    /// A failure on the host, by its message.
    pub fn host(error: impl std::fmt::Display) -> Self {
        Self::Host(error.to_string())
    }

    /// The status code.
    pub fn code(&self) -> Code {
        match self {
            Self::NotFound(_) => Code::NOT_FOUND,
            Self::AlreadyExists(_) => Code::ALREADY_EXISTS,
            Self::FailedPrecondition(_) => Code::FAILED_PRECONDITION,
            Self::InvalidArgument(_) => Code::INVALID_ARGUMENT,
            Self::Unimplemented(_) => Code::UNIMPLEMENTED,
            Self::Guest {
                source: GuestError::Refused(status),
                ..
            } => match status.code() {
                // runc's shim has no code for what the runtime refuses, and clients append its name.
                Code::INVALID_ARGUMENT | Code::INTERNAL | Code::ABORTED => Code::UNKNOWN,
                code => code,
            },
            Self::Guest { .. } | Self::Host(_) => Code::UNKNOWN,
        }
    }
}

impl TaskError {
    /// Whether a create failed in the guest, and disks that it was given are still in use there.
    pub fn leaves_disks_in_use(&self) -> bool {
        matches!(self, Self::Guest { source: GuestError::Refused(status), .. } if status.code() == Code::ABORTED)
    }
}

impl From<GuestError> for TaskError {
    fn from(source: GuestError) -> Self {
        Self::Guest {
            context: "",
            source,
        }
    }
}

impl From<TaskError> for ttrpc::Error {
    fn from(error: TaskError) -> Self {
        ttrpc::Error::RpcStatus(ttrpc::get_status(error.code(), error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_create_that_leaves_disks_in_use_is_told_from_others_and_is_no_code_of_its_own_for_containerd()
     {
        let refused = |code| TaskError::Guest {
            context: "OCI runtime create failed: ",
            source: GuestError::Refused(ttrpc::get_status(code, "why")),
        };
        for (code, in_use) in [(Code::ABORTED, true), (Code::INTERNAL, false)] {
            let error = refused(code);
            assert_eq!(error.leaves_disks_in_use(), in_use);
            assert_eq!(error.code(), Code::UNKNOWN);
            assert_eq!(error.to_string(), "OCI runtime create failed: why");
        }
    }
}
