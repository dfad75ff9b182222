//! The pod's network, by rtnetlink(7).
//!
//! Each step first builds messages, which is plain and tested, then sends them and looks at the
//! kernel's answers one by one. What is there already is no error: a request may be repeated.

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cube_agent_protocol::agent::{Interface, Neighbour, Route};
use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader,
    NetlinkMessage, NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressHeaderFlags, AddressMessage};
use netlink_packet_route::link::{LinkAttribute, LinkFlags, LinkMessage};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteFlags, RouteHeader, RouteMessage, RouteMetric,
    RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::Socket;
use netlink_sys::protocols::NETLINK_ROUTE;

use super::{ConfigureError, Result};

/// Brings up `lo`. By ioctl, which at boot is far less work than netlink.
pub fn bring_up_loopback() -> io::Result<()> {
    // SAFETY: socket(2) has no memory arguments.
    let fd = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor for us.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: ifreq is integers and a union of plain data, for which all zeroes is a value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(b"lo") {
        *to = *from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    // SAFETY: the ioctl reads one ifreq.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets interfaces, routes and neighbours, in this order.
pub fn configure(
    interfaces: &[Interface],
    routes: &[Route],
    neighbours: &[Neighbour],
) -> Result<()> {
    let mut netlink = Netlink::open().map_err(ConfigureError::set("the network"))?;
    for interface in interfaces {
        set_interface(&mut netlink, interface)?;
    }
    if routes.is_empty() && neighbours.is_empty() {
        return Ok(());
    }
    let links = netlink
        .links()
        .map_err(ConfigureError::set("the network"))?;
    let index_of = |name: &str| {
        links
            .iter()
            .find(|link| link.name == name)
            .map(|link| link.index)
            .ok_or_else(|| ConfigureError::Invalid("interface", name.to_owned()))
    };
    for route in in_order(routes) {
        let message = route_message(route, index_of(&route.interface)?)?;
        netlink
            .ask(
                RouteNetlinkMessage::NewRoute(message),
                NLM_F_CREATE | NLM_F_REPLACE,
            )
            .map_err(ConfigureError::set(format!(
                "the route to {:?} by {:?} on {}",
                route.destination, route.gateway, route.interface
            )))?;
    }
    for neighbour in neighbours {
        let message = neighbour_message(neighbour, index_of(&neighbour.interface)?)?;
        netlink
            .ask(
                RouteNetlinkMessage::NewNeighbour(message),
                NLM_F_CREATE | NLM_F_REPLACE,
            )
            .map_err(ConfigureError::set(format!(
                "the neighbour {}",
                neighbour.address
            )))?;
    }
    Ok(())
}

/// A gateway must be reachable when its route is set: routes on the link come first.
fn in_order(routes: &[Route]) -> impl Iterator<Item = &Route> {
    let on_link = |route: &&Route| route.gateway.is_empty();
    let by_gateway = |route: &&Route| !route.gateway.is_empty();
    routes
        .iter()
        .filter(on_link)
        .chain(routes.iter().filter(by_gateway))
}

fn set_interface(netlink: &mut Netlink, wanted: &Interface) -> Result<()> {
    let mac = parse_mac("interfaces[].mac", &wanted.mac)?;
    let links = netlink
        .links()
        .map_err(ConfigureError::set("the network"))?;
    let link = links
        .into_iter()
        .find(|link| link.mac == mac)
        .ok_or_else(|| ConfigureError::NoInterface(wanted.mac.clone()))?;
    let failed = |what: &str| ConfigureError::set(format!("{what} of {}", wanted.name));
    if !wanted.name.is_empty() && wanted.name != link.name {
        // A name can only be changed while the interface is down.
        netlink
            .ask(
                RouteNetlinkMessage::SetLink(link_message(link.index, Some(false), None, None)),
                0,
            )
            .map_err(failed("the state"))?;
        netlink
            .ask(
                RouteNetlinkMessage::SetLink(link_message(
                    link.index,
                    None,
                    Some(&wanted.name),
                    None,
                )),
                0,
            )
            .map_err(failed("the name"))?;
    }
    let mtu = (wanted.mtu != 0).then_some(wanted.mtu);
    netlink
        .ask(
            RouteNetlinkMessage::SetLink(link_message(link.index, Some(true), None, mtu)),
            0,
        )
        .map_err(failed("the state or the MTU"))?;
    for address in &wanted.addresses {
        let message = address_message(address, link.index)?;
        let added = netlink.ask(
            RouteNetlinkMessage::NewAddress(message),
            NLM_F_CREATE | NLM_F_EXCL,
        );
        match added {
            Err(e) if e.raw_os_error() == Some(libc::EEXIST) => {}
            added => added.map_err(failed(&format!("the address {address}")))?,
        }
    }
    Ok(())
}

fn link_message(index: u32, up: Option<bool>, name: Option<&str>, mtu: Option<u32>) -> LinkMessage {
    let mut message = LinkMessage::default();
    message.header.index = index;
    if let Some(up) = up {
        message.header.change_mask = LinkFlags::Up;
        message.header.flags = if up {
            LinkFlags::Up
        } else {
            LinkFlags::empty()
        };
    }
    if let Some(name) = name {
        message
            .attributes
            .push(LinkAttribute::IfName(name.to_owned()));
    }
    if let Some(mtu) = mtu {
        message.attributes.push(LinkAttribute::Mtu(mtu));
    }
    message
}

fn address_message(cidr: &str, index: u32) -> Result<AddressMessage> {
    let (address, length) = parse_cidr("interfaces[].addresses", cidr)?;
    let mut message = AddressMessage::default();
    message.header.family = family(address);
    message.header.prefix_len = length;
    message.header.index = index;
    message.attributes.push(AddressAttribute::Address(address));
    message.attributes.push(AddressAttribute::Local(address));
    match address {
        IpAddr::V4(v4) if length < 31 => {
            let host = u32::MAX.checked_shr(length.into()).unwrap_or(0);
            let broadcast = (u32::from(v4) | host).into();
            message
                .attributes
                .push(AddressAttribute::Broadcast(broadcast));
        }
        IpAddr::V4(_) => {}
        // The host has made sure that nobody else has it; waiting a second would be felt.
        IpAddr::V6(_) => message.header.flags = AddressHeaderFlags::Nodad,
    }
    Ok(message)
}

fn route_message(route: &Route, index: u32) -> Result<RouteMessage> {
    let gateway = match route.gateway.as_str() {
        "" => None,
        gateway => Some(parse_ip("routes[].gateway", gateway)?),
    };
    let destination = match route.destination.as_str() {
        "" => None,
        destination => Some(parse_cidr("routes[].destination", destination)?),
    };
    let mut message = RouteMessage::default();
    let header = &mut message.header;
    header.address_family = match (destination, gateway) {
        (Some((address, _)), _) | (None, Some(address)) => family(address),
        (None, None) => AddressFamily::Inet,
    };
    header.table = RouteHeader::RT_TABLE_MAIN;
    header.protocol = RouteProtocol::Boot;
    header.kind = RouteType::Unicast;
    header.scope = match u8::try_from(route.scope) {
        Ok(scope) => RouteScope::from(scope),
        Err(_) => {
            return Err(ConfigureError::Invalid(
                "routes[].scope",
                route.scope.to_string(),
            ));
        }
    };
    if route.onlink {
        header.flags = RouteFlags::Onlink;
    }
    if let Some((address, length)) = destination.filter(|(_, length)| *length > 0) {
        header.destination_prefix_length = length;
        message
            .attributes
            .push(RouteAttribute::Destination(RouteAddress::from(address)));
    }
    if let Some(gateway) = gateway {
        message
            .attributes
            .push(RouteAttribute::Gateway(RouteAddress::from(gateway)));
    }
    if !route.source.is_empty() {
        let source = parse_ip("routes[].source", &route.source)?;
        message
            .attributes
            .push(RouteAttribute::PrefSource(RouteAddress::from(source)));
    }
    message.attributes.push(RouteAttribute::Oif(index));
    if route.metric != 0 {
        message
            .attributes
            .push(RouteAttribute::Priority(route.metric));
    }
    if route.mtu != 0 {
        message
            .attributes
            .push(RouteAttribute::Metrics(vec![RouteMetric::Mtu(route.mtu)]));
    }
    Ok(message)
}

fn neighbour_message(neighbour: &Neighbour, index: u32) -> Result<NeighbourMessage> {
    let address = parse_ip("neighbours[].address", &neighbour.address)?;
    let state = u16::try_from(neighbour.state)
        .map_err(|_| ConfigureError::Invalid("neighbours[].state", neighbour.state.to_string()))?;
    let mut message = NeighbourMessage::default();
    message.header.family = family(address);
    message.header.ifindex = index;
    message.header.state = NeighbourState::from(state);
    message
        .attributes
        .push(NeighbourAttribute::Destination(match address {
            IpAddr::V4(v4) => NeighbourAddress::Inet(v4),
            IpAddr::V6(v6) => NeighbourAddress::Inet6(v6),
        }));
    message
        .attributes
        .push(NeighbourAttribute::LinkLayerAddress(parse_mac(
            "neighbours[].mac",
            &neighbour.mac,
        )?));
    Ok(message)
}

fn family(address: IpAddr) -> AddressFamily {
    match address {
        IpAddr::V4(_) => AddressFamily::Inet,
        IpAddr::V6(_) => AddressFamily::Inet6,
    }
}

fn parse_ip(field: &'static str, text: &str) -> Result<IpAddr> {
    text.parse()
        .map_err(|_| ConfigureError::Invalid(field, text.to_owned()))
}

fn parse_cidr(field: &'static str, text: &str) -> Result<(IpAddr, u8)> {
    let invalid = || ConfigureError::Invalid(field, text.to_owned());
    let (address, length) = text.split_once('/').ok_or_else(invalid)?;
    let address: IpAddr = address.parse().map_err(|_| invalid())?;
    let most = if address.is_ipv4() { 32 } else { 128 };
    let length = length.parse().ok().filter(|length| *length <= most);
    Ok((address, length.ok_or_else(invalid)?))
}

fn parse_mac(field: &'static str, text: &str) -> Result<Vec<u8>> {
    let bytes: Option<Vec<u8>> = text
        .split(':')
        .map(|byte| {
            let digits = byte.len() == 2 && byte.bytes().all(|b| b.is_ascii_hexdigit());
            digits.then(|| u8::from_str_radix(byte, 16).ok())?
        })
        .collect();
    bytes
        .filter(|bytes| bytes.len() == 6)
        .ok_or_else(|| ConfigureError::Invalid(field, text.to_owned()))
}

/// What is needed to know of an interface.
struct Link {
    index: u32,
    name: String,
    mac: Vec<u8>,
}

/// A socket for rtnetlink. The kernel answers before send returns, so nothing here waits.
struct Netlink {
    socket: Socket,
    sequence: u32,
}

impl Netlink {
    fn open() -> io::Result<Self> {
        let socket = Socket::new(NETLINK_ROUTE)?;
        Ok(Self {
            socket,
            sequence: 0,
        })
    }

    fn send(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.sequence += 1;
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | flags;
        header.sequence_number = self.sequence;
        let mut packet = NetlinkMessage::new(header, NetlinkPayload::from(message));
        packet.finalize();
        let mut bytes = vec![0; packet.buffer_len()];
        packet.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        Ok(())
    }

    /// Sends a message and returns what the kernel says to it.
    fn ask(&mut self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        self.send(message, flags | NLM_F_ACK)?;
        self.answers(|_| {})
    }

    fn links(&mut self) -> io::Result<Vec<Link>> {
        self.send(
            RouteNetlinkMessage::GetLink(LinkMessage::default()),
            NLM_F_DUMP,
        )?;
        let mut links = Vec::new();
        self.answers(|answer| {
            if let RouteNetlinkMessage::NewLink(message) = answer {
                links.push(link_of(message));
            }
        })?;
        Ok(links)
    }

    /// Hands over every message until the end of the answer.
    fn answers(&mut self, mut take: impl FnMut(RouteNetlinkMessage)) -> io::Result<()> {
        loop {
            let (bytes, _) = self.socket.recv_from_full()?;
            let mut rest = bytes.as_slice();
            while !rest.is_empty() {
                let message = NetlinkMessage::<RouteNetlinkMessage>::deserialize(rest)
                    .map_err(io::Error::other)?;
                let length = usize::try_from(message.header.length)
                    .unwrap_or(0)
                    .next_multiple_of(4);
                rest = rest.get(length.max(16)..).unwrap_or_default();
                if message.header.sequence_number != self.sequence {
                    continue;
                }
                match message.payload {
                    NetlinkPayload::Done(_) => return Ok(()),
                    NetlinkPayload::Error(answer) => {
                        return match answer.code {
                            None => Ok(()),
                            Some(code) => {
                                Err(io::Error::from_raw_os_error(code.get().saturating_neg()))
                            }
                        };
                    }
                    NetlinkPayload::InnerMessage(message) => take(message),
                    _ => {}
                }
            }
        }
    }
}

fn link_of(message: LinkMessage) -> Link {
    let mut link = Link {
        index: message.header.index,
        name: String::new(),
        mac: Vec::new(),
    };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Address(mac) => link.mac = mac,
            _ => {}
        }
    }
    link
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(destination: &str, gateway: &str) -> Route {
        let mut route = Route::new();
        route.destination = destination.into();
        route.gateway = gateway.into();
        route.interface = "eth0".into();
        route
    }

    #[test]
    fn a_v4_address_has_its_broadcast_and_a_v6_address_is_not_probed() {
        let message = address_message("10.1.2.3/20", 7).unwrap();
        assert_eq!((message.header.prefix_len, message.header.index), (20, 7));
        assert!(
            message
                .attributes
                .contains(&AddressAttribute::Broadcast([10, 1, 15, 255].into()))
        );
        let message = address_message("10.1.2.3/32", 7).unwrap();
        assert_eq!(message.attributes.len(), 2);
        let message = address_message("fd00::3/64", 7).unwrap();
        assert_eq!(message.header.flags, AddressHeaderFlags::Nodad);
        for bad in [
            "10.1.2.3",
            "10.1.2.3/33",
            "x/8",
            "fd00::/129",
            "10.0.0.1/-1",
        ] {
            assert!(address_message(bad, 1).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_default_route_has_its_gateways_family_and_no_destination() {
        let message = route_message(&route("", "fe80::1"), 3).unwrap();
        assert_eq!(message.header.address_family, AddressFamily::Inet6);
        assert_eq!(message.header.destination_prefix_length, 0);
        let message = route_message(&route("0.0.0.0/0", "10.0.0.1"), 3).unwrap();
        assert_eq!(message.header.address_family, AddressFamily::Inet);
        assert_eq!(
            message.attributes,
            [
                RouteAttribute::Gateway(RouteAddress::Inet([10, 0, 0, 1].into())),
                RouteAttribute::Oif(3)
            ]
        );
    }

    #[test]
    fn a_routes_details_are_in_its_message() {
        let mut route = route("10.2.0.0/16", "169.254.1.1");
        route.source = "10.0.0.9".into();
        route.scope = 253;
        route.metric = 5;
        route.mtu = 1400;
        route.onlink = true;
        let message = route_message(&route, 2).unwrap();
        assert_eq!(message.header.scope, RouteScope::Link);
        assert_eq!(message.header.flags, RouteFlags::Onlink);
        assert!(message.attributes.contains(&RouteAttribute::Priority(5)));
        assert!(
            message
                .attributes
                .contains(&RouteAttribute::Metrics(vec![RouteMetric::Mtu(1400)]))
        );
        route.scope = 256;
        assert!(route_message(&route, 2).is_err());
    }

    #[test]
    fn routes_on_the_link_come_before_those_by_a_gateway() {
        let routes = [route("", "10.0.0.1"), route("10.0.0.0/24", "")];
        let order: Vec<_> = in_order(&routes)
            .map(|route| route.destination.as_str())
            .collect();
        assert_eq!(order, ["10.0.0.0/24", ""]);
    }

    #[test]
    fn mac_addresses_have_six_bytes() {
        assert_eq!(
            parse_mac("mac", "02:00:00:00:00:fF").unwrap(),
            [2, 0, 0, 0, 0, 255]
        );
        for bad in [
            "",
            "02:00:00:00:00",
            "02:00:00:00:00:00:00",
            "2:0:0:0:0:0",
            "02:00:00:00:00:+1",
        ] {
            assert!(parse_mac("mac", bad).is_err(), "{bad}");
        }
    }
}
