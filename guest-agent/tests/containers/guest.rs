//! What only a guest has: settings of the whole machine.

use cube_agent_protocol::agent::{ConfigureRequest, Dns, Interface, Neighbour, Route};
use serde_json::json;
use ttrpc::Code;

use crate::rig::{Agent, MAC, spec};

pub async fn settings(agent: Agent) {
    let mut request = ConfigureRequest::new();
    request.hostname = "pod-1".into();
    request.domainname = "cluster".into();
    request.online_vcpus = 2;
    let mut dns = Dns::new();
    dns.servers = vec!["10.0.0.53".into()];
    dns.options = vec!["ndots:5".into()];
    request.dns = Some(dns).into();
    let mut interface = Interface::new();
    interface.mac = MAC.into();
    interface.name = "net0".into();
    interface.addresses = vec!["10.9.0.2/24".into(), "fd09::2/64".into()];
    interface.mtu = 1400;
    request.interfaces = vec![interface];
    let route = |destination: &str, gateway: &str| {
        let mut route = Route::new();
        route.destination = destination.into();
        route.gateway = gateway.into();
        route.interface = "net0".into();
        route
    };
    let mut near = route("10.7.0.0/16", "");
    near.scope = 253;
    request.routes = vec![route("", "10.9.0.1"), route("", "fd09::1"), near];
    let mut neighbour = Neighbour::new();
    neighbour.address = "10.9.0.1".into();
    neighbour.mac = "02:00:00:00:00:09".into();
    neighbour.interface = "net0".into();
    neighbour.state = 0x80;
    request.neighbours = vec![neighbour];
    request
        .sysctls
        .insert("net.ipv4.ip_unprivileged_port_start".into(), "0".into());
    request.wall_clock_ns = 1_900_000_000_000_000_000;
    agent.configure(&request).await.unwrap();
    // Once more is no error.
    agent.configure(&request).await.unwrap();

    let mut spec = spec(&[
        "sh",
        "-c",
        "hostname; cat /etc/resolv.conf; nproc; ip -o addr show net0 | awk '{print $4}'; cat /sys/class/net/net0/mtu; \
        ip route; ip -6 route show default; ip neigh show dev net0; cat /proc/sys/net/ipv4/ip_unprivileged_port_start; date +%s | cut -c1-5; ping -c1 -W1 127.0.0.1 | grep -c ttl",
    ]);
    spec["mounts"].as_array_mut().unwrap().push(json!(
        {"destination": "/etc/resolv.conf", "type": "bind", "source": "/etc/resolv.conf", "options": ["rbind", "ro"]}
    ));
    spec["process"]["capabilities"] = json!({
        "bounding": ["CAP_NET_RAW"], "effective": ["CAP_NET_RAW"], "permitted": ["CAP_NET_RAW"]
    });
    let (_, out) = agent.run("s", &spec).await;
    for line in [
        "pod-1",
        "nameserver 10.0.0.53",
        "options ndots:5",
        "2",
        "10.9.0.2/24",
        "fd09::2/64",
        "1400",
        "10.7.0.0/16 dev net0 scope link ",
        "0",
        "19000",
        "1",
    ] {
        assert!(
            out.lines().any(|found| found == line),
            "{line:?} is not in {out}"
        );
    }
    for part in [
        "default via 10.9.0.1 dev net0",
        "default via fd09::1 dev net0",
        "10.9.0.1 lladdr 02:00:00:00:00:09 ",
        "PERMANENT",
    ] {
        assert!(out.contains(part), "{part:?} is not in {out}");
    }
    // A container's own settings are the pod's.
    let mut spec = crate::rig::spec(&[
        "sh",
        "-c",
        "hostname; cat /proc/sys/net/core/somaxconn; cat /sys/fs/cgroup/cgroup.controllers; cat /proc/mounts | grep -c virtiofs; ulimit -n; ulimit -u",
    ]);
    spec["hostname"] = json!("pod-2");
    spec["linux"]["sysctl"] = json!({"net.core.somaxconn": "99"});
    let (_, out) = agent.run("s", &spec).await;
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(
        (lines[0], lines[1], lines[3]),
        ("pod-2", "99", "1"),
        "{out}"
    );
    assert_eq!((lines[4], lines[5]), ("1048576", "unlimited"), "{out}");
    for controller in ["cpu", "memory", "pids", "io", "cpuset"] {
        assert!(lines[2].contains(controller), "{out}");
    }
    agent.drop_caches().await.unwrap();
    // Back to one vCPU.
    let mut request = ConfigureRequest::new();
    request.online_vcpus = 1;
    agent.configure(&request).await.unwrap();
    assert_eq!(agent.run("s", &crate::rig::spec(&["nproc"])).await.1, "1\n");
    agent.shutdown().await;
}

pub async fn nothing_left(agent: Agent) {
    // The agent's directories and the processes, as a container sees them that is let in.
    let script = "ls /left/containers; ls -d /left/cgroups/*/; ps -o args | grep -E -c '^(sleep|tail|cat) ' || true";
    let mut spec = spec(&["sh", "-c", script]);
    let namespaces = spec["linux"]["namespaces"].as_array_mut().unwrap();
    namespaces.retain(|namespace| namespace["type"] != "pid");
    for (source, name) in [
        ("/run/cube/containers", "containers"),
        ("/sys/fs/cgroup/pod", "cgroups"),
    ] {
        spec["mounts"].as_array_mut().unwrap().push(json!(
            {"destination": format!("/left/{name}"), "type": "bind", "source": source, "options": ["rbind", "ro"]}
        ));
    }
    let (_, out) = agent.run("alone", &spec).await;
    assert_eq!(out, "alone\n/left/cgroups/alone/\n0\n");
}

pub async fn bad_settings(agent: Agent) {
    let mut requests = Vec::new();
    let mut request = ConfigureRequest::new();
    request.online_vcpus = 65;
    requests.push((request, "65 vCPUs"));
    let mut interface = Interface::new();
    interface.mac = "02:11:22:33:44:55".into();
    let mut request = ConfigureRequest::new();
    request.interfaces = vec![interface];
    requests.push((request, "02:11:22:33:44:55"));
    let mut route = Route::new();
    route.destination = "10.0.0.0/8".into();
    route.interface = "nosuch0".into();
    let mut request = ConfigureRequest::new();
    request.routes = vec![route];
    requests.push((request, "nosuch0"));
    for (request, words) in requests {
        let (code, message) = agent.configure(&request).await.unwrap_err();
        assert_eq!(code, Code::INVALID_ARGUMENT, "{message}");
        assert!(message.contains(words), "{message}");
    }
    let mut request = ConfigureRequest::new();
    request.sysctls.insert("net.no.such".into(), "1".into());
    let (_, message) = agent.configure(&request).await.unwrap_err();
    assert!(message.contains("net.no.such"), "{message}");
}
