//! The lists that containerd's snapshotters hand over, read off their sources (versions as named).

use proptest::prelude::*;

use super::*;

fn mount(kind: &str, source: &str, options: &[&str]) -> Mount {
    Mount {
        kind: kind.into(),
        source: source.into(),
        target: String::new(),
        options: options.iter().map(|&o| o.to_owned()).collect(),
    }
}

/// A plan in short: `disk N: PATH ACCESS` and the mounts, with `/I` for the container's directory.
fn summary(plan: &Rootfs) -> Vec<String> {
    let Rootfs::Guest(rootfs) = plan else {
        return vec!["host".into()];
    };
    let short = |text: &str| text.replace(&format!("{IMAGES_PATH}/c"), "/I");
    let mut lines = Vec::new();
    for (n, image) in rootfs.images.iter().enumerate() {
        let access = if image.read_only { "ro" } else { "rw" };
        lines.push(format!("disk {n}: {} {access}", image.path.display()));
    }
    for mount in &rootfs.mounts {
        for (path, mode) in &mount.directories {
            lines.push(format!("mkdir {mode:o} {}", short(path)));
        }
        let kind = if mount.kind.is_empty() {
            "bind"
        } else {
            &mount.kind
        };
        let source = match mount.image {
            Some(n) => format!("disk {n}"),
            None => short(&mount.source),
        };
        let mut line = format!("{kind} {source} on {}", short(&mount.target));
        if mount.flags & libc::MS_RDONLY != 0 {
            line.push_str(" ro");
        }
        if !mount.data.is_empty() {
            line.push_str(&format!(" {}", short(&mount.data)));
        }
        for device in &mount.devices {
            line.push_str(&format!(" device=disk {device}"));
        }
        lines.push(line);
    }
    lines
}

fn plan(mounts: &[Mount]) -> Result<Rootfs, RootfsError> {
    Rootfs::plan(mounts, "c")
}

const SNAPSHOTS: &str = "/var/lib/containerd/io.containerd.snapshotter.v1.blockfile/snapshots/7";
const LAYER: &str =
    "/var/lib/containerd/io.containerd.snapshotter.v1.erofs/snapshots/3/layer.erofs";
const BASE: &str = "/var/lib/containerd/io.containerd.snapshotter.v1.erofs/snapshots/1/layer.erofs";
const META: &str =
    "/var/lib/containerd/io.containerd.snapshotter.v1.erofs/snapshots/3/fsmeta.erofs";
const WRITABLE: &str =
    "/var/lib/containerd/io.containerd.snapshotter.v1.erofs/snapshots/9/rwlayer.img";

/// An overlay in block mode: the writable image is the first mount, the layers are the next ones.
fn erofs_overlay(lower: &str) -> Mount {
    mount(
        "format/mkdir/overlay",
        "overlay",
        &[
            "X-containerd.mkdir.path={{ mount 0 }}/upper:0755",
            "X-containerd.mkdir.path={{ mount 0 }}/work:0755",
            "workdir={{ mount 0 }}/work",
            "upperdir={{ mount 0 }}/upper",
            lower,
        ],
    )
}

#[test]
fn each_snapshotters_lists_become_directories_of_the_host_or_disks_of_the_guest() {
    let host: &[&str] = &["host"];
    // As containerd's mount manager hands it over, whose own "mkfs" is done.
    let writable = mount("ext4", WRITABLE, &["rw", "loop"]);
    let layer = |path| mount("erofs", path, &["ro", "loop"]);
    let table: &[(&str, Vec<Mount>, &[&str])] = &[
        (
            "native, 1.6 to 2.4",
            vec![mount("bind", "/native/7", &["rbind", "rw"])],
            host,
        ),
        (
            "overlayfs of one layer, 1.6 to 2.4",
            vec![mount("bind", "/overlayfs/7/fs", &["rw", "rbind"])],
            host,
        ),
        (
            "overlayfs, 1.6 to 2.4",
            vec![mount(
                "overlay",
                "overlay",
                &[
                    "index=off",
                    "workdir=/o/7/work",
                    "upperdir=/o/7/fs",
                    "lowerdir=/o/3/fs:/o/1/fs",
                ],
            )],
            host,
        ),
        (
            "btrfs, 1.6 to 2.4",
            vec![mount("btrfs", "/dev/sdb", &["subvolid=260", "rw"])],
            host,
        ),
        ("zfs", vec![mount("zfs", "tank/containerd/7", &[])], host),
        (
            "devmapper with ext4, 1.6 to 2.4",
            vec![mount("ext4", "/dev/mapper/pool-snap-7", &[])],
            &[
                "disk 0: /dev/mapper/pool-snap-7 rw",
                "ext4 disk 0 on /I/rootfs",
            ],
        ),
        (
            "devmapper with xfs, a view, 1.6 to 2.4",
            vec![mount("xfs", "/dev/mapper/pool-snap-7", &["nouuid", "ro"])],
            &[
                "disk 0: /dev/mapper/pool-snap-7 ro",
                "xfs disk 0 on /I/rootfs ro nouuid",
            ],
        ),
        (
            "blockfile, 1.7 to 2.4",
            vec![mount("ext4", SNAPSHOTS, &["loop", "rw"])],
            &[
                &format!("disk 0: {SNAPSHOTS} rw"),
                "ext4 disk 0 on /I/rootfs",
            ],
        ),
        (
            "blockfile, a view, 1.7 to 2.4",
            vec![mount("ext4", SNAPSHOTS, &["loop", "ro"])],
            &[
                &format!("disk 0: {SNAPSHOTS} ro"),
                "ext4 disk 0 on /I/rootfs ro",
            ],
        ),
        (
            "erofs, 2.1, which mounts the layers itself",
            vec![mount(
                "overlay",
                "overlay",
                &[
                    "workdir=/e/9/work",
                    "upperdir=/e/9/fs",
                    "lowerdir=/e/3/fs:/e/1/fs",
                ],
            )],
            host,
        ),
        (
            "erofs, 2.2 to 2.4, nothing claimed: the mount manager has mounted the layers",
            vec![mount(
                "overlay",
                "overlay",
                &[
                    "workdir=/e/9/work",
                    "upperdir=/e/9/fs",
                    "lowerdir=/mount-manager/t/4/2:/mount-manager/t/4/1",
                ],
            )],
            host,
        ),
        (
            "erofs of one layer, a view, 2.1 to 2.4",
            vec![layer(LAYER)],
            &[
                &format!("disk 0: {LAYER} ro"),
                "erofs disk 0 on /I/rootfs ro",
            ],
        ),
        (
            "erofs, one layer below a writable image, 2.2 to 2.4 with a claim",
            vec![
                writable.clone(),
                layer(BASE),
                erofs_overlay("lowerdir={{ mount 1 }}"),
            ],
            &[
                &format!("disk 0: {WRITABLE} rw"),
                &format!("disk 1: {BASE} ro"),
                "ext4 disk 0 on /I/0",
                "erofs disk 1 on /I/1 ro",
                "mkdir 755 /I/0/upper",
                "mkdir 755 /I/0/work",
                "overlay overlay on /I/rootfs workdir=/I/0/work,upperdir=/I/0/upper,lowerdir=/I/1",
            ],
        ),
        (
            "erofs, several layers below a writable image, 2.2 to 2.4 with a claim",
            vec![
                writable.clone(),
                layer(LAYER),
                layer(BASE),
                erofs_overlay("lowerdir={{ overlay 1 2 }}"),
            ],
            &[
                &format!("disk 0: {WRITABLE} rw"),
                &format!("disk 1: {LAYER} ro"),
                &format!("disk 2: {BASE} ro"),
                "ext4 disk 0 on /I/0",
                "erofs disk 1 on /I/1 ro",
                "erofs disk 2 on /I/2 ro",
                "mkdir 755 /I/0/upper",
                "mkdir 755 /I/0/work",
                "overlay overlay on /I/rootfs workdir=/I/0/work,upperdir=/I/0/upper,lowerdir=/I/1:/I/2",
            ],
        ),
        (
            "erofs, merged metadata (fsmerge), 2.2 to 2.4 with a claim",
            vec![
                writable.clone(),
                mount(
                    "erofs",
                    META,
                    &[
                        "ro",
                        "loop",
                        &format!("device={BASE}"),
                        &format!("device={LAYER}"),
                    ],
                ),
                erofs_overlay("lowerdir={{ mount 1 }}"),
            ],
            &[
                &format!("disk 0: {WRITABLE} rw"),
                &format!("disk 1: {META} ro"),
                &format!("disk 2: {BASE} ro"),
                &format!("disk 3: {LAYER} ro"),
                "ext4 disk 0 on /I/0",
                "erofs disk 1 on /I/1 ro device=disk 2 device=disk 3",
                "mkdir 755 /I/0/upper",
                "mkdir 755 /I/0/work",
                "overlay overlay on /I/rootfs workdir=/I/0/work,upperdir=/I/0/upper,lowerdir=/I/1",
            ],
        ),
        (
            "erofs without layers, 2.2 to 2.4 with a claim",
            vec![
                writable.clone(),
                mount(
                    "format/mkdir/bind",
                    "{{ mount 0 }}/upper",
                    &[
                        "X-containerd.mkdir.path={{ mount 0 }}/upper:0755",
                        "rw",
                        "rbind",
                    ],
                ),
            ],
            &[
                &format!("disk 0: {WRITABLE} rw"),
                "ext4 disk 0 on /I/0",
                "mkdir 755 /I/0/upper",
                "bind /I/0/upper on /I/rootfs",
            ],
        ),
        (
            "erofs, merged metadata, a view, 2.4 with a claim",
            vec![
                mount("erofs", META, &["ro", "loop", &format!("device={BASE}")]),
                mount("format/bind", "{{ mount 0 }}", &["ro", "rbind"]),
            ],
            &[
                &format!("disk 0: {META} ro"),
                &format!("disk 1: {BASE} ro"),
                "erofs disk 0 on /I/0 ro device=disk 1",
                "bind /I/0 on /I/rootfs ro",
            ],
        ),
        (
            "erofs, a view of several layers, 2.4 with a claim",
            vec![
                layer(LAYER),
                layer(BASE),
                mount(
                    "format/mkdir/overlay",
                    "overlay",
                    &["lowerdir={{ overlay 0 1 }}"],
                ),
            ],
            &[
                &format!("disk 0: {LAYER} ro"),
                &format!("disk 1: {BASE} ro"),
                "erofs disk 0 on /I/0 ro",
                "erofs disk 1 on /I/1 ro",
                "overlay overlay on /I/rootfs lowerdir=/I/0:/I/1",
            ],
        ),
    ];
    for (name, list, expected) in table {
        let plan = plan(list).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(summary(&plan), *expected, "{name}");
        if let Rootfs::Host(mounts) = &plan {
            assert_eq!(mounts, list, "{name}");
        }
        let images = expected.iter().filter(|l| l.starts_with("disk ")).count();
        assert_eq!(plan.disks(), images, "{name}");
    }
}

#[test]
fn an_empty_list_is_the_hosts() {
    assert_eq!(plan(&[]).unwrap(), Rootfs::Host(Vec::new()));
}

#[test]
fn a_list_that_no_guest_can_have_is_refused_with_a_sentence() {
    let layer = || mount("erofs", LAYER, &["ro", "loop"]);
    let overlay = |option: &str| {
        mount(
            "format/mkdir/overlay",
            "overlay",
            &["lowerdir={{ mount 0 }}", option],
        )
    };
    for (list, word) in [
        (vec![mount("fuse.sshfs", "a:/b", &[])], "fuse.sshfs"),
        (
            // Directory mode: claimed, although the writable layer is a directory.
            vec![layer(), overlay("upperdir=/var/lib/containerd/9/fs")],
            "default_size",
        ),
        (
            vec![layer(), overlay("upperdir=/run/cube/images/c/../../x")],
            "default_size",
        ),
        (vec![layer(), overlay("lowerdir={{ mount 1 }}")], "before"),
        (
            vec![layer(), overlay("lowerdir={{ overlay 0 7 }}")],
            "before",
        ),
        (vec![layer(), overlay("lowerdir={{ printf 0 }}")], "printf"),
        (vec![layer(), overlay("lowerdir={{ mount 0 ")], "mount 0"),
        (
            vec![
                layer(),
                overlay("X-containerd.mkdir.path={{ mount 0 }}/a:7777"),
            ],
            "7777",
        ),
        (
            vec![
                layer(),
                overlay("X-containerd.mkdir.path={{ mount 0 }}/a:0755:5:5"),
            ],
            "5:5",
        ),
        (
            vec![layer(), overlay("X-containerd.mkdir.path=/etc/x")],
            "/etc/x",
        ),
        (
            vec![mount(
                "erofs",
                LAYER,
                &["ro", "X-containerd.dmverity=/l/.dmverity"],
            )],
            "dmverity",
        ),
        (vec![layer(), overlay("uidmap=0:1000:1")], "uidmap"),
        (vec![mount("mkfs/ext4", WRITABLE, &["loop"])], "mkfs"),
        (vec![mount("format/bind", "{{ mount 0 }}", &[])], "format"),
        (
            vec![Mount {
                target: "../etc".into(),
                ..layer()
            }],
            "leads out",
        ),
    ] {
        let error = plan(&list).unwrap_err().to_string();
        assert!(error.contains(word), "{list:?}: {error}");
    }
}

#[test]
fn a_file_system_that_cannot_be_written_to_is_read_only_whatever_the_options_say() {
    for kind in ["erofs", "squashfs"] {
        let plan = plan(&[mount(kind, "/image", &["rw", "loop"])]).unwrap();
        let Rootfs::Guest(rootfs) = plan else {
            panic!("{plan:?}");
        };
        assert!(rootfs.images[0].read_only);
        assert_ne!(rootfs.mounts[0].flags & libc::MS_RDONLY, 0);
    }
}

fn any_option() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("ro".to_owned()),
        Just("rw".to_owned()),
        Just("loop".to_owned()),
        Just("rbind".to_owned()),
        "(lowerdir|upperdir|workdir|device|X-containerd.mkdir.path)=[a-z/:.0-7]{0,12}",
        r"(lowerdir|workdir|X-containerd.mkdir.path)=\{\{ ?(mount|source|target|overlay) [0-3]( [0-3])? ?\}\}/?[a-z.]{0,4}",
        "[ -~]{0,16}",
    ]
}

fn any_mount() -> impl Strategy<Value = Mount> {
    let kind = prop_oneof![
        4 => "(format/|mkdir/|mkfs/)?(format/)?(ext4|erofs|overlay|bind|xfs|tmpfs)",
        1 => "[ -~]{0,8}",
    ];
    let source = prop_oneof![
        "/[a-z]{1,8}",
        r"\{\{ (mount|source) [0-3] \}\}",
        "[ -~]{0,12}"
    ];
    let target = prop_oneof![4 => Just(String::new()), 1 => "[a-z./]{0,8}"];
    let options = prop::collection::vec(any_option(), 0..5);
    (kind, source, target, options).prop_map(|(kind, source, target, options)| Mount {
        kind,
        source,
        target,
        options,
    })
}

proptest! {
    #[test]
    fn whatever_the_list_the_host_mounts_no_image_and_the_guest_nothing_of_the_host(
        mounts in prop::collection::vec(any_mount(), 0..5)
    ) {
        match plan(&mounts) {
            Ok(Rootfs::Host(planned)) => {
                for mount in &planned {
                    let image = image_kind(&mount.kind).is_some() && !is_bind(mount, &mount.kind);
                    prop_assert!(!image, "{mount:?}");
                }
            }
            Ok(Rootfs::Guest(rootfs)) => {
                let base = format!("{IMAGES_PATH}/c/");
                for mount in &rootfs.mounts {
                    prop_assert!(mount.target.starts_with(&base), "{mount:?}");
                    let up = std::path::Component::ParentDir;
                    prop_assert!(Path::new(&mount.target).components().all(|c| c != up), "{mount:?}");
                    prop_assert!(!mount.data.contains("{{"), "{mount:?}");
                    let images = mount.image.iter().chain(&mount.devices);
                    prop_assert!(images.copied().all(|n| n < rootfs.images.len()));
                    if mount.flags & libc::MS_BIND != 0 {
                        prop_assert!(mount.source.starts_with(base.trim_end_matches('/')));
                    }
                    // What can be written to is mounted so, and the other way round.
                    if let Some(n) = mount.image {
                        let read_only = mount.flags & libc::MS_RDONLY != 0;
                        prop_assert_eq!(read_only, rootfs.images[n].read_only);
                    }
                }
            }
            Err(error) => {
                let text = error.to_string();
                prop_assert!(!text.contains('\n') && !text.is_empty(), "{text}");
            }
        }
    }
}
