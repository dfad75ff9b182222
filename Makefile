# make run     set up everything and run two containers, each in a microVM of its own
# make test    all tests
# make test-more   the longer ones, and those that have not settled yet
# make test-contract   the contract on every containerd from 1.6 to 2.4, and containerd's own client and stress tests
# make test-crashes    300 rounds of kill -9 at random moments (ROUNDS=…, CUBE_TEST_SEED=…)
# make bench   the measurements of docs/SPECIFICATION.md
# make install, make uninstall   honour PREFIX and DESTDIR

PREFIX ?= /usr/local
DESTDIR ?=

# .cargo/config.toml names the target.
TRIPLE := x86_64-unknown-linux-gnu
TARGET := $(or $(CARGO_TARGET_DIR),target)
RELEASE := $(TARGET)/$(TRIPLE)/release
PROGRAMS := containerd-shim-cube-rs cube-hypervisor cube-agent
# Where run, test and bench install to: the layout is what an installation has.
STAGE := $(abspath $(TARGET))/stage

bindir := $(DESTDIR)$(PREFIX)/bin
sharedir := $(DESTDIR)$(PREFIX)/share/cube

.PHONY: build setup programs kernel stage run test check unit vm-tests client-tests test-more test-contract test-conformance test-crashes bench install uninstall clean help
.DELETE_ON_ERROR:

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

build: programs kernel

setup:
	@tests/setup

programs: setup
	@echo "Building $(PROGRAMS) (release)"
	@cargo build --release --locked $(PROGRAMS:%=--package %)
	@guest-agent/initramfs $(RELEASE)/cube-agent $(TARGET)/initramfs.img

kernel: setup
	@kernel=$$(kernel-config/build) && mkdir -p $(TARGET) && ln -sfn "$$kernel" $(TARGET)/vmlinux

# Takes what `make build` left: on a usual machine one builds as a user and installs as root.
install:
	@for file in $(PROGRAMS:%=$(RELEASE)/%) $(TARGET)/initramfs.img $(TARGET)/vmlinux; do \
	    [ -e $$file ] || { echo "$$file is missing: run make build first" >&2; exit 1; }; done
	install -d $(bindir) $(sharedir)
	install -m 755 $(RELEASE)/containerd-shim-cube-rs $(RELEASE)/cube-hypervisor $(bindir)
	ln -sfn containerd-shim-cube-rs $(bindir)/containerd-shim-cube-v1
	install -m 644 $(TARGET)/vmlinux $(TARGET)/initramfs.img shim/config.toml $(sharedir)

# Leaves /etc/cube alone: that is the administrator's.
uninstall:
	rm -f $(bindir)/containerd-shim-cube-rs $(bindir)/containerd-shim-cube-v1 $(bindir)/cube-hypervisor
	rm -f $(sharedir)/vmlinux $(sharedir)/initramfs.img $(sharedir)/config.toml
	[ ! -d $(sharedir) ] || rmdir $(sharedir)

stage: build
	@$(MAKE) --no-print-directory -s install PREFIX=$(STAGE) DESTDIR=

run: stage
	@tests/demo $(STAGE)

test: check unit vm-tests client-tests

# What needs no virtual machine, the fastest first.
check: setup
	@cargo fmt --all --check
	@tests/check-dependencies
	@cargo clippy --workspace --all-targets --locked --quiet --keep-going -- -D warnings

unit: setup
	@cargo test --workspace --lib --bins --test delete --locked --quiet

vm-tests: stage
	@tests/run-all $(STAGE)

test-more: stage
	@tests/run-all $(STAGE) more

test-contract: stage
	@CUBE_TEST_TIMEOUT=14400 tests/run-all $(STAGE) contract
	@$(MAKE) --no-print-directory test-conformance

# Those of containerd's own client tests that are about tasks; test-conformance has all.
CLIENT_TESTS := Container(Start|Output|Exec|Pids|Kill|KillAll|Wait|CloseIO|Metrics|Attach|ExitedAtSet)|TaskResize|ShortRunningTaskPid
CLIENT_TESTS := $(CLIENT_TESTS)|DeleteRunningContainer|(Process|Task)ForceDelete|WaitStopped(Task|Process)|ShimDoesNotLeakPipes
client-tests: stage
	@tests/conformance/run --prefix $(STAGE) io.containerd.cube.v1 '^Test($(CLIENT_TESTS))$$'

# containerd's own client tests, with cube and with runc; docs/CONFORMANCE.md lists them.
test-conformance: stage
	@tests/conformance/run io.containerd.runc.v2
	@tests/conformance/run --prefix $(STAGE) io.containerd.cube.v1

ROUNDS ?= 300
test-crashes: stage
	@CUBE_TEST_TIMEOUT=14400 CUBE_TEST_ROUNDS=$(ROUNDS) tests/run-all $(STAGE) cube-tests/crashes@2.4

bench: stage
	@tests/bench/run $(STAGE)

clean:
	cargo clean
