/*
 * What container workloads expect of the guest kernel, as a list that is checked inside the guest.
 *
 * This is the /init of the test guest (see the script `test`). It prints one line for each
 * expectation, "ok NAME" or "MISSING NAME: why", then "done COUNT", and resets the machine.
 * The list at the end of this file is the part to read and to extend.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mqueue.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <arpa/inet.h>
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <linux/io_uring.h>
#include <linux/landlock.h>
#include <linux/loop.h>
#include <linux/netfilter.h>
#include <linux/netfilter/ipset/ip_set.h>
#include <linux/netfilter/nf_tables.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netlink.h>
#include <linux/perf_event.h>
#include <linux/pkt_sched.h>
#include <linux/prctl.h>
#include <linux/rtnetlink.h>
#include <linux/seccomp.h>
#include <linux/sock_diag.h>
#include <netinet/in.h>
#include <sys/fanotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <termios.h>

/* ---- Small helpers: each check returns 0, or -1 with the reason in `why`. ---- */

static char why[512];

static int missing(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(why, sizeof(why), format, arguments);
	va_end(arguments);
	return -1;
}

static int worked(long result, const char *what)
{
	return result >= 0 ? 0 : missing("%s: %s", what, strerror(errno));
}

static char *contents(const char *path)
{
	static char buffer[65536];
	int fd = open(path, O_RDONLY);
	ssize_t length = 0, n;

	if (fd < 0)
		return NULL;
	while ((n = read(fd, buffer + length, sizeof(buffer) - 1 - length)) > 0)
		length += n;
	close(fd);
	buffer[length] = 0;
	return buffer;
}

static int put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY);
	ssize_t n = fd < 0 ? -1 : write(fd, text, strlen(text));

	close(fd);
	return n < 0 ? missing("writing %s to %s: %s", text, path, strerror(errno)) : 0;
}

static int has_word(const char *text, const char *word)
{
	size_t length = strlen(word);

	for (const char *at = text; (at = strstr(at, word)); at++) {
		int starts = at == text || strchr(" \t\n", at[-1]);
		if (starts && strchr(" \t\n", at[length]))
			return 1;
	}
	return 0;
}

/* Every word of the list stands in the file. */
static int words_in(const char *path, const char *list)
{
	char *text = contents(path), copy[2048];

	if (!text)
		return missing("%s: %s", path, strerror(errno));
	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *word = strtok_r(copy, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
		if (!has_word(text, word))
			return missing("%s is not in %s", word, path);
	return 0;
}

/* Every name of the list exists in the directory. */
static int names_in(const char *directory, const char *list)
{
	char copy[2048], path[4096];

	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *name = strtok_r(copy, " ", &rest); name; name = strtok_r(NULL, " ", &rest)) {
		snprintf(path, sizeof(path), "%s/%s", directory, name);
		if (access(path, F_OK))
			return missing("%s: %s", path, strerror(errno));
	}
	return 0;
}

static int absent(const char *list)
{
	char copy[2048];

	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *name = strtok_r(copy, " ", &rest); name; name = strtok_r(NULL, " ", &rest))
		if (!access(name, F_OK))
			return missing("%s exists", name);
	return 0;
}

/* Runs a check in a child, so that what it changes is gone with it. */
static int in_child(int (*check)(void))
{
	int status, fds[2];

	if (pipe(fds))
		return missing("pipe: %s", strerror(errno));
	pid_t pid = fork();
	if (pid == 0) {
		int failed = check();
		if (failed)
			(void)!write(fds[1], why, strlen(why) + 1);
		_exit(failed ? 1 : 0);
	}
	close(fds[1]);
	waitpid(pid, &status, 0);
	ssize_t n = read(fds[0], why, sizeof(why) - 1);
	close(fds[0]);
	if (status && n <= 0)
		return missing("the check ended with status 0x%x", status);
	return status ? -1 : 0;
}

/* ---- Netlink: enough to ask whether the kernel knows a name. ---- */

struct message {
	struct nlmsghdr header;
	char body[2048];
};

static void start(struct message *m, int type, int flags, const void *family, size_t length)
{
	memset(m, 0, sizeof(*m));
	m->header.nlmsg_type = type;
	m->header.nlmsg_flags = NLM_F_REQUEST | flags;
	m->header.nlmsg_len = NLMSG_LENGTH(length);
	memcpy(NLMSG_DATA(&m->header), family, length);
}

static struct nlattr *attribute(struct message *m, int type, const void *data, size_t length)
{
	struct nlattr *a = (void *)((char *)&m->header + NLMSG_ALIGN(m->header.nlmsg_len));

	a->nla_type = type;
	a->nla_len = NLA_HDRLEN + length;
	if (length)
		memcpy((char *)a + NLA_HDRLEN, data, length);
	m->header.nlmsg_len = (char *)a - (char *)&m->header + NLA_ALIGN(a->nla_len);
	return a;
}

static void end_nest(struct message *m, struct nlattr *nest)
{
	nest->nla_type |= NLA_F_NESTED;
	nest->nla_len = (char *)&m->header + m->header.nlmsg_len - (char *)nest;
}

/* Sends messages and returns the first error answered (0 if none), or the errno of the socket. */
static int ask(int protocol, const void *data, size_t length)
{
	char reply[8192];
	int fd = socket(AF_NETLINK, SOCK_RAW, protocol), error = 0;
	struct timeval limit = {.tv_sec = 2};

	if (fd < 0)
		return errno;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	if (send(fd, data, length, 0) < 0) {
		error = errno;
	} else {
		ssize_t n = recv(fd, reply, sizeof(reply), 0);
		struct nlmsghdr *answer = (void *)reply;
		if (n < 0)
			error = errno;
		else if (answer->nlmsg_type == NLMSG_ERROR)
			error = -((struct nlmsgerr *)NLMSG_DATA(answer))->error;
	}
	close(fd);
	return error;
}

/* Kinds of interfaces: an unknown kind is answered by EOPNOTSUPP, one that lacks parameters otherwise. */
static int link_kinds(const char *list)
{
	char copy[512];

	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *kind = strtok_r(copy, " ", &rest); kind; kind = strtok_r(NULL, " ", &rest)) {
		struct message m;
		struct ifinfomsg family = {0};
		start(&m, RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL | NLM_F_ACK, &family, sizeof(family));
		struct nlattr *info = attribute(&m, IFLA_LINKINFO, NULL, 0);
		attribute(&m, IFLA_INFO_KIND, kind, strlen(kind) + 1);
		end_nest(&m, info);
		int error = ask(NETLINK_ROUTE, &m, m.header.nlmsg_len);
		if (error == EOPNOTSUPP)
			return missing("interfaces of kind %s are unknown", kind);
	}
	return 0;
}

/* Queueing disciplines: asked for on the loopback device; an unknown one is ENOENT. */
static int queueing_disciplines(const char *list)
{
	char copy[512];

	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *kind = strtok_r(copy, " ", &rest); kind; kind = strtok_r(NULL, " ", &rest)) {
		struct message m;
		struct tcmsg family = {.tcm_ifindex = 1, .tcm_parent = TC_H_ROOT, .tcm_handle = 0x10000};
		if (!strcmp(kind, "ingress") || !strcmp(kind, "clsact"))
			family.tcm_parent = TC_H_CLSACT, family.tcm_handle = TC_H_MAKE(TC_H_CLSACT, 0);
		start(&m, RTM_NEWQDISC, NLM_F_CREATE | NLM_F_REPLACE | NLM_F_ACK, &family, sizeof(family));
		attribute(&m, TCA_KIND, kind, strlen(kind) + 1);
		if (ask(NETLINK_ROUTE, &m, m.header.nlmsg_len) == ENOENT)
			return missing("queueing discipline %s is unknown", kind);
	}
	return 0;
}

static size_t nft_message(char *at, int type, int flags, int family, const char *table, const char *chain,
			  const char *hook_type, const char *expression)
{
	struct message m;
	struct nfgenmsg header = {.nfgen_family = family};
	uint32_t zero = 0, hook = htonl(NF_INET_POST_ROUTING);

	start(&m, NFNL_SUBSYS_NFTABLES << 8 | type, flags, &header, sizeof(header));
	attribute(&m, type == NFT_MSG_NEWTABLE ? NFTA_TABLE_NAME : NFTA_CHAIN_TABLE, table, strlen(table) + 1);
	if (type == NFT_MSG_NEWCHAIN) {
		attribute(&m, NFTA_CHAIN_NAME, chain, strlen(chain) + 1);
		struct nlattr *nest = attribute(&m, NFTA_CHAIN_HOOK, NULL, 0);
		attribute(&m, NFTA_HOOK_HOOKNUM, &hook, 4);
		attribute(&m, NFTA_HOOK_PRIORITY, &zero, 4);
		end_nest(&m, nest);
		attribute(&m, NFTA_CHAIN_TYPE, hook_type, strlen(hook_type) + 1);
	}
	if (type == NFT_MSG_NEWRULE) {
		attribute(&m, NFTA_RULE_CHAIN, chain, strlen(chain) + 1);
		struct nlattr *list = attribute(&m, NFTA_RULE_EXPRESSIONS, NULL, 0);
		struct nlattr *element = attribute(&m, NFTA_LIST_ELEM, NULL, 0);
		attribute(&m, NFTA_EXPR_NAME, expression, strlen(expression) + 1);
		end_nest(&m, attribute(&m, NFTA_EXPR_DATA, NULL, 0));
		end_nest(&m, element);
		end_nest(&m, list);
	}
	memcpy(at, &m, m.header.nlmsg_len);
	return NLMSG_ALIGN(m.header.nlmsg_len);
}

static size_t nft_batch(char *at, int type)
{
	struct message m;
	struct nfgenmsg header = {.res_id = htons(NFNL_SUBSYS_NFTABLES)};

	start(&m, type, 0, &header, sizeof(header));
	memcpy(at, &m, m.header.nlmsg_len);
	return NLMSG_ALIGN(m.header.nlmsg_len);
}

/* A table with a NAT chain at its hook, as `nft add table`, `nft add chain` make them. */
static int nft_nat_chain(int family)
{
	char batch[8192];
	size_t n = nft_batch(batch, NFNL_MSG_BATCH_BEGIN);

	n += nft_message(batch + n, NFT_MSG_NEWTABLE, NLM_F_CREATE, family, "cube", NULL, NULL, NULL);
	n += nft_message(batch + n, NFT_MSG_NEWCHAIN, NLM_F_CREATE | NLM_F_ACK, family, "cube", "c", "nat", NULL);
	n += nft_batch(batch + n, NFNL_MSG_BATCH_END);
	int error = ask(NETLINK_NETFILTER, batch, n);
	return error ? missing("a NAT chain of family %d: %s", family, strerror(error)) : 0;
}

static int nft_chains(void)
{
	return nft_nat_chain(NFPROTO_INET) || nft_nat_chain(NFPROTO_IPV4) || nft_nat_chain(NFPROTO_IPV6) ? -1 : 0;
}

/* A rule with an expression that has no parameters: ENOENT if the expression is unknown. */
static int nft_expressions(const char *list)
{
	char copy[512], batch[8192];

	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *name = strtok_r(copy, " ", &rest); name; name = strtok_r(NULL, " ", &rest)) {
		size_t n = nft_batch(batch, NFNL_MSG_BATCH_BEGIN);
		n += nft_message(batch + n, NFT_MSG_NEWRULE, NLM_F_CREATE | NLM_F_ACK, NFPROTO_IPV4, "cube", "c",
				 NULL, name);
		n += nft_batch(batch + n, NFNL_MSG_BATCH_END);
		if (ask(NETLINK_NETFILTER, batch, n) == ENOENT)
			return missing("nft expression %s is unknown", name);
	}
	return 0;
}

static int ip_set_types(const char *list)
{
	char copy[512];

	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *type = strtok_r(copy, " ", &rest); type; type = strtok_r(NULL, " ", &rest)) {
		struct message m;
		struct nfgenmsg header = {.nfgen_family = AF_INET};
		unsigned char protocol = IPSET_PROTOCOL, family = NFPROTO_IPV4;
		start(&m, NFNL_SUBSYS_IPSET << 8 | IPSET_CMD_TYPE, NLM_F_ACK, &header, sizeof(header));
		attribute(&m, IPSET_ATTR_PROTOCOL, &protocol, 1);
		attribute(&m, IPSET_ATTR_TYPENAME, type, strlen(type) + 1);
		attribute(&m, IPSET_ATTR_FAMILY, &family, 1);
		int error = ask(NETLINK_NETFILTER, &m, m.header.nlmsg_len);
		if (error)
			return missing("set type %s: %s", type, strerror(error));
	}
	return 0;
}

/* ---- Checks that need more than a name. ---- */

static int unshares_every_namespace(void)
{
	return worked(unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET |
			      CLONE_NEWCGROUP | CLONE_NEWTIME),
		      "unshare of all namespaces");
}

static int mounts_overlay_in_user_namespace(void)
{
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
		return missing("a user namespace: %s", strerror(errno));
	if (put("/proc/self/uid_map", "0 0 1") || put("/proc/self/setgroups", "deny") || put("/proc/self/gid_map", "0 0 1"))
		return -1;
	if (mount("t", "/tmp", "tmpfs", 0, NULL))
		return missing("tmpfs in a user namespace: %s", strerror(errno));
	mkdir("/tmp/l", 0755), mkdir("/tmp/u", 0755), mkdir("/tmp/w", 0755), mkdir("/tmp/m", 0755);
	return worked(mount("o", "/tmp/m", "overlay", 0, "lowerdir=/tmp/l,upperdir=/tmp/u,workdir=/tmp/w,userxattr"),
		      "overlay in a user namespace");
}

static int cgroup_limits_work(void)
{
	mkdir("/sys/fs/cgroup/c", 0755);
	return names_in("/sys/fs/cgroup/c", "cpu.max cpu.weight cpu.pressure cpuset.cpus cpuset.mems io.max io.weight "
					    "io.pressure memory.max memory.high memory.swap.max memory.oom.group "
					    "memory.pressure pids.max hugetlb.2MB.max rdma.max cgroup.kill cgroup.freeze") ||
			       put("/sys/fs/cgroup/c/cpu.max", "50000 100000") ||
			       put("/sys/fs/cgroup/c/memory.max", "67108864") ||
			       put("/sys/fs/cgroup/c/pids.max", "100") || put("/sys/fs/cgroup/c/cpuset.cpus", "0")
		       ? -1
		       : 0;
}

static int cgroup_device_filter(void)
{
	struct bpf_insn allow[] = {
		{.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 1},
		{.code = BPF_JMP | BPF_EXIT},
	};
	union bpf_attr load = {
		.prog_type = BPF_PROG_TYPE_CGROUP_DEVICE,
		.insns = (unsigned long)allow,
		.insn_cnt = 2,
		.license = (unsigned long)"GPL",
	};
	int program = syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof(load));

	if (program < 0)
		return missing("loading a device filter: %s", strerror(errno));
	union bpf_attr attach = {
		.target_fd = open("/sys/fs/cgroup/c", O_RDONLY | O_DIRECTORY),
		.attach_bpf_fd = program,
		.attach_type = BPF_CGROUP_DEVICE,
		.attach_flags = BPF_F_ALLOW_MULTI,
	};
	return worked(syscall(SYS_bpf, BPF_PROG_ATTACH, &attach, sizeof(attach)), "attaching a device filter");
}

static int io_uring(void)
{
	struct io_uring_params parameters = {0};

	return worked(syscall(SYS_io_uring_setup, 4, &parameters), "io_uring_setup");
}

static int landlock(void)
{
	return worked(syscall(SYS_landlock_create_ruleset, NULL, 0, LANDLOCK_CREATE_RULESET_VERSION), "landlock");
}

static int seccomp_actions(void)
{
	unsigned actions[] = {SECCOMP_RET_USER_NOTIF, SECCOMP_RET_ERRNO, SECCOMP_RET_KILL_PROCESS, SECCOMP_RET_LOG};

	for (size_t i = 0; i < sizeof(actions) / sizeof(*actions); i++)
		if (syscall(SYS_seccomp, SECCOMP_GET_ACTION_AVAIL, 0, &actions[i]))
			return missing("seccomp action 0x%x: %s", actions[i], strerror(errno));
	return 0;
}

static int fanotify_permission(void)
{
	return worked(fanotify_init(FAN_CLASS_CONTENT, O_RDONLY), "fanotify_init with permission events");
}

static int user_faults(void)
{
	return worked(syscall(SYS_userfaultfd, O_CLOEXEC), "userfaultfd");
}

static int keyrings(void)
{
	return worked(syscall(SYS_add_key, "user", "cube", "x", 1, -2 /* process keyring */), "add_key");
}

static int message_queues(void)
{
	return worked(mq_open("/cube", O_CREAT | O_RDWR, 0600, NULL), "mq_open");
}

static int shared_memory(void)
{
	return worked(shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600), "shmget");
}

static int file_handles(void)
{
	struct {
		struct file_handle handle;
		char data[MAX_HANDLE_SZ];
	} h = {.handle.handle_bytes = MAX_HANDLE_SZ};
	int mount_id;

	return worked(name_to_handle_at(AT_FDCWD, "/tmp", &h.handle, &mount_id, 0), "name_to_handle_at");
}

static int asynchronous_io(void)
{
	unsigned long context = 0;

	return worked(syscall(SYS_io_setup, 4, &context), "io_setup");
}

static int processes_read_each_other(void)
{
	char from = 'x', to = 0;
	struct iovec local = {&to, 1}, remote = {&from, 1};

	if (process_vm_readv(getpid(), &local, 1, &remote, 1, 0) != 1)
		return missing("process_vm_readv: %s", strerror(errno));
	if (syscall(SYS_kcmp, getpid(), getpid(), 0 /* KCMP_FILE */, 1, 2) < 0)
		return missing("kcmp: %s", strerror(errno));
	unsigned size;
	return worked(prctl(PR_SET_MM, PR_SET_MM_MAP_SIZE, &size, 0, 0), "PR_SET_MM");
}

static int software_events(void)
{
	struct perf_event_attr event = {
		.type = PERF_TYPE_SOFTWARE,
		.size = sizeof(event),
		.config = PERF_COUNT_SW_TASK_CLOCK,
	};

	return worked(syscall(SYS_perf_event_open, &event, 0, -1, -1, 0), "perf_event_open");
}

static int memory_advice(void)
{
	void *p = mmap(NULL, 4 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (madvise(p, 4 << 20, MADV_HUGEPAGE))
		return missing("MADV_HUGEPAGE: %s", strerror(errno));
	if (madvise(p, 4 << 20, MADV_MERGEABLE))
		return missing("MADV_MERGEABLE: %s", strerror(errno));
	return worked(syscall(SYS_memfd_create, "cube", 4 /* MFD_HUGETLB */), "memfd_create with huge pages");
}

static int barriers_and_sequences(void)
{
	if (syscall(SYS_membarrier, 0, 0, 0) < 0)
		return missing("membarrier: %s", strerror(errno));
	syscall(SYS_rseq, NULL, 0, 0, 0);
	return errno == ENOSYS ? missing("rseq") : 0;
}

static int old_programs(void)
{
	long pid;
	time_t (*vsyscall_time)(time_t *) = (void *)0xffffffffff600400;

	__asm__ volatile("int $0x80" : "=a"(pid) : "a"(20) : "memory", "r8", "r9", "r10", "r11");
	if (pid != getpid())
		return missing("the 32-bit getpid answered %ld", pid);
	(void)vsyscall_time(NULL);
	syscall(SYS_pkey_alloc, 0, 0);
	if (errno == ENOSYS)
		return missing("pkey_alloc");
	return worked(syscall(SYS_modify_ldt, 0, why, 0), "modify_ldt");
}

static int swap_space(void)
{
	swapon("/nonexistent", 0);
	return errno == ENOSYS ? missing("swapon") : 0;
}

static int socket_families(void)
{
	struct {
		const char *name;
		int family, type, protocol;
	} sockets[] = {
		{"unix", AF_UNIX, SOCK_SEQPACKET, 0},
		{"IPv4", AF_INET, SOCK_STREAM, 0},
		{"IPv6", AF_INET6, SOCK_STREAM, 0},
		{"ICMP without privileges", AF_INET, SOCK_DGRAM, IPPROTO_ICMP},
		{"packet", AF_PACKET, SOCK_RAW, 0},
		{"vsock", AF_VSOCK, SOCK_STREAM, 0},
		{"netfilter", AF_NETLINK, SOCK_RAW, NETLINK_NETFILTER},
		{"uevent", AF_NETLINK, SOCK_RAW, NETLINK_KOBJECT_UEVENT},
		{"generic netlink", AF_NETLINK, SOCK_RAW, NETLINK_GENERIC},
		{"socket statistics", AF_NETLINK, SOCK_RAW, NETLINK_SOCK_DIAG},
	};

	put("/proc/sys/net/ipv4/ping_group_range", "0 0");
	for (size_t i = 0; i < sizeof(sockets) / sizeof(*sockets); i++)
		if (socket(sockets[i].family, sockets[i].type, sockets[i].protocol) < 0)
			return missing("a socket for %s: %s", sockets[i].name, strerror(errno));
	return 0;
}

static int socket_statistics(void)
{
	int families[] = {AF_INET, AF_INET6, AF_UNIX, AF_PACKET, AF_NETLINK, AF_VSOCK};

	for (size_t i = 0; i < sizeof(families) / sizeof(*families); i++) {
		struct message m;
		char request[256] = {[0] = families[i], [1] = IPPROTO_TCP};
		size_t length = families[i] == AF_INET || families[i] == AF_INET6 ? 56 : families[i] == AF_UNIX || families[i] == AF_VSOCK ? 24 : 20;
		if (families[i] != AF_INET && families[i] != AF_INET6)
			request[1] = 0;
		start(&m, SOCK_DIAG_BY_FAMILY, NLM_F_DUMP, request, length);
		int error = ask(NETLINK_SOCK_DIAG, &m, m.header.nlmsg_len);
		if (error)
			return missing("statistics of socket family %d: %s", families[i], strerror(error));
	}
	return 0;
}

static int xattrs_of_tmpfs(void)
{
	char acl[] = "\2\0\0\0\1\0\6\0\377\377\377\377\4\0\4\0\377\377\377\377\40\0\4\0\377\377\377\377";

	close(open("/tmp/x", O_CREAT | O_WRONLY, 0644));
	if (setxattr("/tmp/x", "trusted.cube", "1", 1, 0))
		return missing("trusted.*: %s", strerror(errno));
	if (setxattr("/tmp/x", "security.cube", "1", 1, 0))
		return missing("security.*: %s", strerror(errno));
	return worked(setxattr("/tmp/x", "system.posix_acl_access", acl, sizeof(acl) - 1, 0), "an ACL");
}

static int loop_devices(void)
{
	int control = open("/dev/loop-control", O_RDWR);

	if (control < 0)
		return missing("/dev/loop-control: %s", strerror(errno));
	if (!access("/sys/block/loop0", F_OK))
		return missing("loop0 was made at boot");
	return worked(ioctl(control, LOOP_CTL_GET_FREE), "a free loop device");
}

static int pseudo_terminals(void)
{
	return worked(open("/dev/ptmx", O_RDWR | O_NOCTTY), "/dev/ptmx");
}

static int virtio_disk(void)
{
	char sector[512] = {0};
	int fd = open("/dev/vda", O_RDONLY);

	if (fd < 0 || read(fd, sector, sizeof(sector)) != sizeof(sector))
		return missing("/dev/vda: %s", strerror(errno));
	return strncmp(sector, "cube's disk", 11) ? missing("/dev/vda has other contents") : 0;
}

static int random_bytes(void)
{
	char byte;
	int fd = open("/dev/hwrng", O_RDONLY);

	return fd < 0 || read(fd, &byte, 1) != 1 ? missing("/dev/hwrng: %s", strerror(errno)) : 0;
}

static int second_cpu_comes_on_line(void)
{
	cpu_set_t set;

	if (sysconf(_SC_NPROCESSORS_ONLN) != 1)
		return missing("maxcpus=1 left %ld processors on line", sysconf(_SC_NPROCESSORS_ONLN));
	if (put("/sys/devices/system/cpu/cpu1/online", "1"))
		return -1;
	CPU_ZERO(&set);
	CPU_SET(1, &set);
	return worked(sched_setaffinity(0, sizeof(set), &set), "running on the second processor");
}

static int memory_hotplug(void)
{
	return names_in("/sys/devices/system/memory", "auto_online_blocks block_size_bytes memory0/online") ||
			       words_in("/sys/devices/system/memory/auto_online_blocks", "online")
		       ? -1
		       : 0;
}

static int interfaces_are_only(const char *list)
{
	char *text = contents("/proc/net/dev"), copy[512];
	int expected = 0, found = 0;

	for (char *at = text; (at = strchr(at, ':')); at++)
		found++;
	snprintf(copy, sizeof(copy), "%s", list);
	char *rest;
	for (char *name = strtok_r(copy, " ", &rest); name; name = strtok_r(NULL, " ", &rest), expected++)
		if (names_in("/sys/class/net", name))
			return -1;
	return found == expected ? 0 : missing("%d interfaces instead of %s", found, list);
}

/* ---- The list. ---- */

#define EXPECT(name, check)                                                      \
	do {                                                                     \
		*why = 0;                                                        \
		if (check)                                                       \
			printf("MISSING %s: %s\n", name, why);                   \
		else                                                             \
			printf("ok %s\n", name);                                 \
		count++;                                                         \
	} while (0)

static int check_all(void)
{
	int count = 0;

	EXPECT("the test can fail", !names_in("/", "nonexistent"));

	EXPECT("all namespaces", names_in("/proc/self/ns", "cgroup ipc mnt net pid pid_for_children time user uts"));
	EXPECT("unprivileged unshare of all namespaces", in_child(unshares_every_namespace));
	EXPECT("all controllers of cgroup v2",
	       words_in("/sys/fs/cgroup/cgroup.controllers", "cpuset cpu io memory hugetlb pids rdma misc"));
	EXPECT("limits of cgroup v2", cgroup_limits_work());
	EXPECT("device rules of cgroup v2", cgroup_device_filter());
	EXPECT("controllers of cgroup v1", words_in("/proc/cgroups", "cpu cpuacct devices freezer memory pids perf_event"));
	EXPECT("pressure", names_in("/proc/pressure", "cpu io memory"));

	EXPECT("file systems", words_in("/proc/filesystems", "proc sysfs tmpfs devtmpfs devpts mqueue cgroup cgroup2 bpf "
							     "hugetlbfs overlay ext2 ext3 ext4 xfs erofs squashfs fuse "
							     "fuseblk virtiofs autofs binfmt_misc"));
	EXPECT("overlay mounted by an unprivileged user", in_child(mounts_overlay_in_user_namespace));
	EXPECT("extended attributes and ACLs on tmpfs", xattrs_of_tmpfs());
	EXPECT("loop devices on demand", loop_devices());
	EXPECT("fuse", names_in("/dev", "fuse"));
	EXPECT("terminals", pseudo_terminals());

	EXPECT("seccomp with notification", seccomp_actions());
	EXPECT("landlock", landlock());
	EXPECT("BPF only for the privileged", words_in("/proc/sys/kernel/unprivileged_bpf_disabled", "2"));
	EXPECT("io_uring", io_uring());
	EXPECT("asynchronous I/O", asynchronous_io());
	EXPECT("fanotify", fanotify_permission());
	EXPECT("inotify", names_in("/proc/sys/fs/inotify", "max_user_watches"));
	EXPECT("userfaultfd", user_faults());
	EXPECT("keyrings", keyrings());
	EXPECT("POSIX message queues", message_queues());
	EXPECT("System V IPC", shared_memory());
	EXPECT("file handles", file_handles());
	EXPECT("process_vm_readv, kcmp and PR_SET_MM", processes_read_each_other());
	EXPECT("children of a process", names_in("/proc/self/task", "1/children"));
	EXPECT("software performance events", software_events());
	EXPECT("huge, merged and hugetlb pages", memory_advice());
	EXPECT("membarrier and rseq", barriers_and_sequences());
	EXPECT("32-bit calls, vsyscalls, protection keys, LDT", old_programs());
	EXPECT("swap", swap_space());
	EXPECT("core dumps", names_in("/proc/sys/kernel", "core_pattern"));
	EXPECT("the kernel's configuration", names_in("/proc", "config.gz"));
	EXPECT("accounting of tasks", names_in("/proc/self", "io smaps_rollup pagemap timens_offsets"));

	EXPECT("sockets", socket_families());
	EXPECT("socket statistics", socket_statistics());
	EXPECT("BBR and CUBIC", words_in("/proc/sys/net/ipv4/tcp_available_congestion_control", "bbr cubic"));
	EXPECT("no interface that nobody asked for", interfaces_are_only("lo eth0"));
	EXPECT("interfaces", link_kinds("veth bridge dummy vlan vxlan geneve macvlan macvtap ipvlan vrf ifb wireguard"));
	EXPECT("tun device", names_in("/dev/net", "tun"));
	EXPECT("traffic control", queueing_disciplines("htb tbf prio sfq fq fq_codel netem ingress clsact"));
	EXPECT("bridge netfilter", names_in("/proc/sys/net/bridge", "bridge-nf-call-iptables bridge-nf-call-ip6tables"));
	EXPECT("connection tracking", names_in("/proc/sys/net/netfilter", "nf_conntrack_max nf_conntrack_tcp_be_liberal"));
	EXPECT("nftables: NAT in families inet, ip, ip6", nft_chains());
	EXPECT("nftables: expressions",
	       nft_expressions("immediate cmp lookup payload meta bitwise byteorder dynset range rt counter limit log "
			       "reject redir masq nat ct fib match target numgen hash quota queue objref connlimit "
			       "socket tproxy"));
	EXPECT("iptables", names_in("/proc/net", "ip_tables_names ip6_tables_names"));
	EXPECT("iptables: matches",
	       words_in("/proc/net/ip_tables_matches",
			"addrtype bpf cgroup comment connbytes connlimit connmark conntrack dscp hashlimit icmp iprange "
			"ipvs length limit mac mark multiport owner physdev pkttype recent rpfilter set socket state "
			"statistic string tcp tcpmss time ttl u32 udp"));
	EXPECT("iptables: targets",
	       words_in("/proc/net/ip_tables_targets",
			"CHECKSUM CLASSIFY CONNMARK CT DNAT DSCP LOG MARK MASQUERADE NETMAP NFLOG NFQUEUE NOTRACK REDIRECT "
			"REJECT SET SNAT TCPMSS TPROXY TRACE"));
	EXPECT("ip6tables: matches", words_in("/proc/net/ip6_tables_matches",
					      "addrtype comment conntrack hl icmp6 ipv6header mark multiport owner recent "
					      "rpfilter set state statistic tcp udp"));
	EXPECT("ip6tables: targets", words_in("/proc/net/ip6_tables_targets", "DNAT LOG MARK MASQUERADE REDIRECT REJECT SNAT "
									      "TPROXY"));
	EXPECT("ipset", ip_set_types("bitmap:port hash:ip hash:ip,port hash:ip,port,ip hash:ip,port,net hash:net "
				     "hash:net,port list:set"));
	EXPECT("IPVS", names_in("/proc/net", "ip_vs ip_vs_conn"));

	EXPECT("virtio drivers", names_in("/sys/bus/virtio/drivers",
					  "virtio_blk virtio_net virtio_console virtio_rng virtiofs virtio_balloon virtio_mem "
					  "vmw_vsock_virtio_transport"));
	EXPECT("a disk by virtio", virtio_disk());
	EXPECT("entropy by virtio", random_bytes());
	EXPECT("memory hotplug", memory_hotplug());
	EXPECT("CPU hotplug", in_child(second_cpu_comes_on_line));
	EXPECT("a panic names functions", names_in("/proc", "kallsyms sysrq-trigger"));
	EXPECT("no PCI, ACPI, modules, keyboard, virtual terminal, clock chip",
	       absent("/sys/bus/pci /sys/firmware/acpi /sys/class/input /sys/bus/serio /sys/class/tty/tty0 /dev/rtc0 "
		      "/sys/class/dmi /proc/modules"));
	return count;
}

static void mount_all(void)
{
	mkdir("/proc", 0755), mkdir("/sys", 0755), mkdir("/dev", 0755), mkdir("/tmp", 0755);
	mount("proc", "/proc", "proc", 0, NULL);
	mount("sysfs", "/sys", "sysfs", 0, NULL);
	mount("dev", "/dev", "devtmpfs", 0, NULL);
	mkdir("/dev/pts", 0755), mkdir("/dev/mqueue", 0755);
	mount("pts", "/dev/pts", "devpts", 0, NULL);
	mount("mqueue", "/dev/mqueue", "mqueue", 0, NULL);
	mount("tmp", "/tmp", "tmpfs", 0, NULL);
	mount("cgroup", "/sys/fs/cgroup", "cgroup2", 0, NULL);
}

int main(void)
{
	mount_all();
	int console = open("/dev/console", O_RDWR);
	dup2(console, 0), dup2(console, 1), dup2(console, 2);
	setvbuf(stdout, NULL, _IOLBF, 0);

	/* The controllers have to be passed on before a child group has them. */
	put("/sys/fs/cgroup/cgroup.subtree_control", "+cpuset +cpu +io +memory +hugetlb +pids +rdma +misc");

	char *command_line = contents("/proc/cmdline");
	if (strstr(command_line, "expect=panic")) {
		put("/proc/sysrq-trigger", "c");
	} else if (strstr(command_line, "expect=hang")) {
		printf("hanging\n");
		for (;;)
			;
	}
	printf("done %d\n", check_all());
	fflush(stdout);
	tcdrain(1);
	reboot(RB_AUTOBOOT);
	return 1;
}
