//! The guest's side: this program as `/init`. Services wait on vsock ports; what they saw goes to
//! the host in lines.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::thread;

use crate::common::twin::{HOST_LINES, accept, connect, listen, reset};
use crate::pattern::Pattern;

/// Sends [`BULK`] bytes and takes as many, at once.
pub const PORT_BULK: u32 = 1;
/// Sends back what it gets.
pub const PORT_ECHO: u32 = 2;
/// Counts what it gets until the end of the stream, and only then answers.
pub const PORT_COUNT: u32 = 3;
/// Writes until it has written [`LAST_WORDS`] bytes and is killed.
pub const PORT_DYING: u32 = 4;
/// Ends its own direction first, then counts and reports.
pub const PORT_MUTE: u32 = 5;
/// Nobody listens here.
pub const PORT_NOBODY: u32 = 6;
/// Resets the machine.
pub const PORT_END: u32 = 7;
/// Sends nothing and takes [`LAST_WORDS`] bytes only when it is told to by a second connection.
pub const PORT_SLOW: u32 = 8;

/// Takes everything and looks at none of it.
pub const PORT_SINK: u32 = 9;
/// Sends [`BULK`] zeros.
pub const PORT_SOURCE: u32 = 10;

/// On the host: no service.
pub const HOST_NOBODY: u32 = 101;

pub const BULK: u64 = 64 << 20;
pub const LAST_WORDS: u64 = 700_000;
pub const CONNECTIONS: usize = 500;

pub fn serve() -> io::Result<()> {
    let mut lines = connect(HOST_LINES)?;
    let refused = connect(HOST_NOBODY).unwrap_err();
    let listen_to = [
        PORT_BULK,
        PORT_ECHO,
        PORT_COUNT,
        PORT_DYING,
        PORT_MUTE,
        PORT_END,
        PORT_SLOW,
        PORT_SINK,
        PORT_SOURCE,
    ];
    let mut listeners = Vec::new();
    for port in listen_to {
        listeners.push(listen(port)?);
    }
    let [bulk, echo, count, dying, mute, end, slow, sink, source] = &listeners[..] else {
        return Err(io::Error::other("there are as many ports as listeners"));
    };
    writeln!(lines, "ready; nobody: {:?}", refused.raw_os_error())?;
    let each = |service: &'static str, result: io::Result<String>| {
        let line = match result {
            Ok(line) => format!("{service}: {line}\n"),
            Err(error) => format!("{service}: error {error}\n"),
        };
        let mut lines = &lines;
        if let Err(error) = lines.write_all(line.as_bytes()) {
            println!("Cannot report: {error}");
        }
    };
    let each = &each;
    thread::scope(|scope| {
        scope.spawn(move || {
            loop {
                each("bulk", accept(bulk).and_then(serve_bulk));
            }
        });
        scope.spawn(move || {
            loop {
                match accept(echo) {
                    Ok(stream) => {
                        // A thread each, with a small stack: there are hundreds.
                        let spawned = thread::Builder::new()
                            .stack_size(64 * 1024)
                            .spawn(move || serve_echo(stream));
                        if let Err(error) = spawned {
                            println!("Cannot start a thread: {error}");
                        }
                    }
                    Err(error) => println!("Cannot accept: {error}"),
                }
            }
        });
        scope.spawn(move || {
            loop {
                each("count", accept(count).and_then(serve_count));
            }
        });
        scope.spawn(move || {
            loop {
                each("dying", accept(dying).and_then(serve_dying));
            }
        });
        scope.spawn(move || {
            loop {
                each("mute", accept(mute).and_then(serve_mute));
            }
        });
        scope.spawn(move || {
            loop {
                each(
                    "slow",
                    accept(slow).and_then(|stream| serve_slow(stream, slow)),
                );
            }
        });
        scope.spawn(move || {
            loop {
                each("sink", accept(sink).and_then(serve_sink));
            }
        });
        scope.spawn(move || {
            loop {
                each("source", accept(source).and_then(serve_source));
            }
        });
        // Whoever connects here ends the machine.
        let _ = accept(end);
        reset()
    })
}

fn serve_bulk(stream: UnixStream) -> io::Result<String> {
    let mut writer = stream.try_clone()?;
    let sender = thread::spawn(move || {
        Pattern::new(1).write(&mut writer, BULK)?;
        writer.shutdown(Shutdown::Write)
    });
    let received = Pattern::new(2).check(&mut &stream);
    let sent = sender
        .join()
        .map_err(|_| io::Error::other("the sender panicked"))?;
    Ok(format!("sent {sent:?}, received {received:?}"))
}

fn serve_echo(mut stream: UnixStream) -> io::Result<()> {
    let mut buffer = [0; 4096];
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(()),
            count => stream.write_all(&buffer[..count])?,
        }
    }
}

fn serve_sink(mut stream: UnixStream) -> io::Result<String> {
    let mut buffer = vec![0; 64 * 1024];
    let mut received = 0;
    loop {
        match stream.read(&mut buffer)? {
            0 => return Ok(format!("{received}")),
            count => received += count,
        }
    }
}

fn serve_source(mut stream: UnixStream) -> io::Result<String> {
    let buffer = vec![0; 64 * 1024];
    for _ in 0..BULK / buffer.len() as u64 {
        stream.write_all(&buffer)?;
    }
    Ok(format!("{BULK}"))
}

fn serve_count(mut stream: UnixStream) -> io::Result<String> {
    let received = Pattern::new(3).check(&mut stream);
    // A client that has left is not there to read it.
    let _ = write!(stream, "{received:?}");
    Ok(format!("{received:?}"))
}

fn serve_mute(mut stream: UnixStream) -> io::Result<String> {
    stream.write_all(b"the end")?;
    stream.shutdown(Shutdown::Write)?;
    let received = Pattern::new(4).check(&mut stream);
    Ok(format!("{received:?}"))
}

/// A child that is killed with its last words under way.
fn serve_dying(stream: UnixStream) -> io::Result<String> {
    // SAFETY: the child makes system calls and touches its own memory only, and ends by a signal.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let mut stream = stream;
            let _ = Pattern::new(5).write(&mut stream, LAST_WORDS);
            // SAFETY: no pointers are passed.
            unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
            loop {
                thread::park();
            }
        }
        child => {
            drop(stream);
            let mut status = 0;
            // SAFETY: the pointer is to an integer of ours.
            unsafe { libc::waitpid(child, &mut status, 0) };
            Ok(format!("signal {}", libc::WTERMSIG(status)))
        }
    }
}

fn serve_slow(mut stream: UnixStream, listener: &OwnedFd) -> io::Result<String> {
    accept(listener)?;
    let received = Pattern::new(6).check(&mut stream);
    Ok(format!("{received:?}"))
}
