//! Containers that are whole systems: systemd as their init, and hosts of containers of their own.

use cube_tests::*;

/// Makes the FIFO by which the container tells that it is ready, if nobody has yet.
const READY: &str = "[ -e /ready ] || mkfifo /ready 2>/dev/null";

/// Tells so when the target that systemd starts for is reached.
const UNIT: &str = "\
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'echo reached >/ready'
[Install]
WantedBy=graphical.target
";

/// A running container whose init is systemd, as users of other runtimes start it: without more rights than others
/// have, with a cgroup that it may divide, and with file systems in memory where it wants them.
fn systemd() -> Running {
    let script = format!(
        "{READY}; printf '%s' \"$UNIT\" >/etc/systemd/system/ready.service; \
         ln -s ../ready.service /etc/systemd/system/multi-user.target.wants/; exec /sbin/init"
    );
    Container::new()
        .image(SYSTEM)
        .option("--env", "container=containerd")
        .option("--env", &format!("UNIT={UNIT}"))
        .option("--with-ns", "cgroup:")
        .option("--mount", CGROUPS)
        .option(
            "--mount",
            "type=tmpfs,src=tmpfs,dst=/run/lock,options=rw:nosuid:nodev",
        )
        .start(&["sh", "-c", &script])
}

fn wait_until_ready(running: &Running) {
    let script = format!("{READY}; cat /ready");
    let told = running.exec(&["sh", "-c", &script]).success();
    assert_eq!(told, "reached\n");
}

/// The container's own cgroup, which it may divide.
const CGROUPS: &str = "type=cgroup,src=cgroup,dst=/sys/fs/cgroup,options=rw";

#[test]
fn systemd_as_init_reaches_its_target_runs_services_within_limits_and_powers_off() {
    let events = Events::listen();
    let running = systemd();
    wait_until_ready(&running);
    let state = running.exec(&["systemctl", "is-system-running", "--wait"]);
    let failed = running
        .exec(&["systemctl", "--failed", "--no-legend"])
        .text();
    assert_eq!(
        (state.status, state.text().trim()),
        (0, "running"),
        "{failed}"
    );

    // A service has a cgroup of its own below the container's, and its limits hold.
    let script = "cat /proc/self/cgroup; cat /sys/fs/cgroup$(sed s/^0::// /proc/self/cgroup)/memory.max; id -u";
    let service = [
        "systemd-run",
        "--quiet",
        "--wait",
        "--pipe",
        "--unit=limited",
    ];
    let limits = [
        "-p",
        "MemoryMax=64M",
        "-p",
        "User=nobody",
        "sh",
        "-c",
        script,
    ];
    let text = running.exec(&[&service[..], &limits].concat()).success();
    assert_eq!(text, "0::/system.slice/limited.service\n67108864\n65534\n");

    running.exec(&["systemctl", "poweroff"]);
    // It may not switch the machine off, so it ends.
    assert_eq!(
        events.wait_for("/tasks/exit", &running.id).status(),
        Some(0)
    );
}

#[test]
fn systemd_as_init_ends_by_the_signal_that_asks_it_to() {
    let events = Events::listen();
    let running = systemd();
    wait_until_ready(&running);
    running.task("kill", &["--signal", "SIGRTMIN+3"]).success();
    assert_eq!(
        events.wait_for("/tasks/exit", &running.id).status(),
        Some(0)
    );
    let id = running.id.clone();
    drop(running);
    assert_no_traces_of(&id);
}

/// A container that may do what a host of containers has to.
fn host() -> Container {
    let capabilities = [
        "SYS_ADMIN",
        "NET_ADMIN",
        "SYS_RESOURCE",
        "SYS_PTRACE",
        "MKNOD",
    ];
    let container = Container::new()
        .image(SYSTEM)
        .option("--with-ns", "cgroup:")
        .option("--mount", CGROUPS);
    capabilities.iter().fold(container, |container, name| {
        container.option("--cap-add", &format!("CAP_{name}"))
    })
}

/// Leaves the container's cgroup to its children, as a host of containers has to, for a cgroup with processes cannot
/// hand its controllers on.
const DIVIDE: &str = "\
set -e
mkdir /sys/fs/cgroup/init
echo $$ >/sys/fs/cgroup/init/cgroup.procs
echo +cpu +memory +pids +io >/sys/fs/cgroup/cgroup.subtree_control
";

#[test]
fn a_container_with_the_rights_for_it_mounts_overlays_on_a_tmpfs_and_on_a_volume() {
    let dir = TestDir::new();
    let source = dir.path().display();
    let volume = format!("type=bind,src={source},dst=/vol,options=rbind:rw");
    let script = "\
        set -e
        mount -t tmpfs none /mnt
        for d in /mnt /vol; do
            mkdir $d/upper $d/work $d/all
            mount -t overlay -o lowerdir=/etc,upperdir=$d/upper,workdir=$d/work overlay $d/all
            echo mine >$d/all/hostname && rm $d/all/passwd && mv $d/all/systemd $d/all/moved
            cat $d/all/hostname /etc/hostname; ls $d/upper; stat -c %F:%t:%T $d/upper/passwd; umount $d/all
        done";
    let ended = host().option("--mount", &volume).sh(script);
    let of_each = "mine\nsystem\nhostname\nmoved\npasswd\nsystemd\ncharacter special file:0:0\n";
    assert_eq!(ended.text(), of_each.repeat(2), "{ended:?}");
}

#[test]
fn a_container_with_the_rights_for_it_makes_namespaces_and_another_root() {
    let inner = "\
        set -e
        hostname inner; echo $$
        mount --bind /bundle/rootfs /mnt && cd /mnt && mkdir old && mount -t proc proc proc
        pivot_root . old
        busybox umount -l /old && busybox rmdir /old
        hostname; cat /proc/self/cgroup; busybox ls /proc | busybox grep -c ^[0-9]; busybox ip link | busybox grep -c ^[0-9]; ls /";
    let script =
        "unshare --mount --pid --ipc --net --uts --cgroup --fork sh -c \"$INNER\"; hostname";
    let host = host().option("--env", &format!("INNER={inner}"));
    let ended = host.sh(script);
    let hostname = ended.text().lines().last().map(str::to_owned);
    assert_ne!(hostname.as_deref(), Some("inner"));
    let inside = ended.text();
    let inside = inside
        .trim_end()
        .rsplit_once('\n')
        .map(|(inside, _)| inside);
    assert_eq!(
        inside,
        Some("1\ninner\n0::/\n3\n1\nbin\ndev\netc\nproc\nsys\ntmp"),
        "{ended:?}"
    );
}

#[test]
fn a_container_with_the_rights_for_it_divides_its_cgroup_and_limits_hold() {
    let script = format!(
        "{DIVIDE}\
        mkdir /sys/fs/cgroup/small && cd /sys/fs/cgroup/small
        echo 16M >memory.max && echo 0 >memory.swap.max && echo 5 >pids.max
        sh -c 'echo $$ >cgroup.procs; exec tail /dev/zero' || echo $?
        grep '^oom_kill ' memory.events
        sh -c 'echo $$ >cgroup.procs; for i in 1 2 3 4 5 6 7 8; do sleep 100 & done' 2>/dev/null || echo too many
        cat pids.current; echo 1 >cgroup.kill
        cat cgroup.controllers"
    );
    let ended = host().sh(&script);
    assert_eq!(
        ended.text(),
        "137\noom_kill 1\ntoo many\n4\ncpu io memory pids\n",
        "{ended:?}"
    );
}

#[test]
fn a_container_with_the_rights_for_it_connects_namespaces_by_a_bridge_and_filters_between_them() {
    let script = "\
        set -e
        ip link add br0 type bridge && ip address add 10.9.0.1/24 dev br0 && ip link set br0 up
        for n in 1 2; do
            ip netns add n$n
            ip link add v$n type veth peer name eth0 netns n$n
            ip link set v$n master br0 up
            ip -n n$n address add 10.9.0.1$n/24 dev eth0
            ip -n n$n link set eth0 up; ip -n n$n link set lo up
            ip -n n$n route add default via 10.9.0.1
        done
        ping() { ip netns exec n1 busybox ping -q -c 1 -W 10 $1 >/dev/null && echo reached || echo lost; }
        ping 10.9.0.12
        nft add table inet t
        nft add chain inet t in '{ type filter hook input priority 0; }'
        nft add rule inet t in iifname br0 icmp type echo-request counter drop
        ip netns exec n1 busybox ping -q -c 1 -W 1 10.9.0.1 >/dev/null || echo filtered
        nft list chain inet t in | grep -o 'packets [0-9]*'";
    let ended = host().sh(script);
    assert_eq!(ended.text(), "reached\nfiltered\npackets 1\n", "{ended:?}");
}

#[test]
fn a_container_with_the_rights_for_it_runs_containers_by_runc() {
    let script = format!(
        "{DIVIDE}\
        cd /bundle && runc spec
        sed -i 's/\"terminal\": true/\"terminal\": false/; s/\"sh\"$/\"sh\", \"-c\", \"id -u; hostname; cat \\/proc\\/self\\/cgroup; ls \\/; exit 3\"/' config.json
        runc run inner || echo $?"
    );
    let ended = host().sh(&script);
    assert_eq!(
        ended.text(),
        "0\nrunc\n0::/\nbin\ndev\netc\nproc\nsys\ntmp\n3\n",
        "{ended:?}"
    );
}

#[test]
fn a_privileged_container_with_the_hosts_disks_is_refused_with_the_way_out_and_without_them_runs() {
    let container = Container::new().flag("--privileged");
    let ended = container.run(&["true"]);
    assert_ne!(ended.status, 0);
    assert!(
        ended.stderr.contains("privileged-without-host-devices"),
        "{ended:?}"
    );
    try_ctr(&["container", "delete", &container.id]);
    assert_no_traces_of(&container.id);

    // containerd 1.6 has no such option.
    if !must_ctr(&["run", "--help"]).contains("privileged-without-host-devices") {
        return;
    }
    let container = Container::new()
        .flag("--privileged")
        .flag("--privileged-without-host-devices");
    let script = "mount -t tmpfs none /mnt && echo 1 >/proc/sys/net/ipv4/ip_forward && ls /dev/sd* /dev/vd* /dev/loop* 2>/dev/null; \
        grep CapEff /proc/self/status | tr -d '\\t'; grep -c ' ro,' /proc/mounts";
    let all = "CapEff:000001ffffffffff\n0\n";
    assert_eq!(container.sh(script).text(), all);
}
