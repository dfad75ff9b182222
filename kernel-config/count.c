/*
 * A QEMU plugin that counts the guest kernel's instructions until /init starts, and then ends QEMU.
 *
 * Arguments: map=FILE (System.map of the kernel) and out=FILE (the result). A line of the result is
 * KIND INSTRUCTIONS NAME; the kinds are total, function, and initcall (with all that it calls, up to the
 * start of the next one), each sorted with the most expensive first. Debian's QEMU comes without the
 * header of its plugin interface, so what is used of version 1 is declared here.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef uint64_t plugin_id;
struct qemu_plugin_tb;
void qemu_plugin_register_vcpu_tb_trans_cb(plugin_id, void (*)(plugin_id, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, void (*)(unsigned, void *), int flags, void *data);
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb *, int operation, void *, uint64_t);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
void qemu_plugin_register_atexit_cb(plugin_id, void (*)(plugin_id, void *), void *data);

__attribute__((visibility("default"))) int qemu_plugin_version = 1;

/* Where the kernel is linked, where it lies while paging is off, and where /init is linked. */
static const uint64_t kernel_virtual = 0xffffffff80000000, kernel_physical = 0x1000000, kernel_size = 0x8000000;
static const uint64_t init_start = 0x400000, init_end = 0x500000;

struct block {
	uint64_t address, instructions, executed;
	struct block *next;
};

struct function {
	uint64_t address, instructions, as_initcall;
	bool initcall;
	char name[128];
};

static struct block *blocks;
static struct function *functions;
static size_t function_count;
static uint64_t executed, executed_before_initcall;
static struct function *running_initcall;
static char *map_path, *out_path;

static struct function *function_at(uint64_t address)
{
	size_t low = 0, high = function_count;

	if (address >= kernel_physical && address < kernel_physical + kernel_size)
		address += kernel_virtual;
	while (high - low > 1) {
		size_t middle = (low + high) / 2;
		if (functions[middle].address <= address)
			low = middle;
		else
			high = middle;
	}
	return address >= kernel_virtual && function_count ? &functions[low] : NULL;
}

static int by_address(const void *a, const void *b)
{
	const struct function *x = a, *y = b;

	return x->address < y->address ? -1 : x->address > y->address;
}

static int by_instructions(const void *a, const void *b)
{
	const struct function *x = a, *y = b;

	return x->instructions > y->instructions ? -1 : x->instructions < y->instructions;
}

static int by_initcall(const void *a, const void *b)
{
	const struct function *x = a, *y = b;

	return x->as_initcall > y->as_initcall ? -1 : x->as_initcall < y->as_initcall;
}

/* Entries of the table of initcalls are named __initcall__kmod_MODULE__NUMBER_LINE_FUNCTIONLEVEL. */
static void mark_initcall(const char *entry)
{
	static const char *const levels = " early 0 0s 1 1s 2 2s 3 3s 4 4s 5 5s rootfs 6 6s 7 7s con ";
	const char *start = entry;
	int skip = 0;

	while ((start = strstr(start + 1, "__")) && !(sscanf(start, "__%*d_%*d_%n", &skip), skip))
		;
	for (size_t i = 0; start && i < function_count; i++) {
		size_t length = strlen(functions[i].name);
		char level[160];
		if (strncmp(start + skip, functions[i].name, length))
			continue;
		snprintf(level, sizeof(level), " %s ", start + skip + length);
		if (strstr(levels, level))
			functions[i].initcall = true;
	}
}

static void read_map(void)
{
	FILE *map = fopen(map_path, "r");
	struct function f = {0};
	char type, **entries = NULL;
	size_t entry_count = 0;

	if (!map)
		exit((perror(map_path), 1));
	while (fscanf(map, "%lx %c %127s", &f.address, &type, f.name) == 3) {
		if (!strncmp(f.name, "__initcall__", 12)) {
			entries = realloc(entries, (entry_count + 1) * sizeof(*entries));
			entries[entry_count++] = strdup(f.name);
		}
		if (!strchr("tTwW", type))
			continue;
		functions = realloc(functions, (function_count + 1) * sizeof(f));
		functions[function_count++] = f;
	}
	fclose(map);
	qsort(functions, function_count, sizeof(*functions), by_address);
	for (size_t i = 0; i < entry_count; i++)
		mark_initcall(entries[i]);
}

static void initcall_starts(unsigned vcpu, void *started)
{
	(void)vcpu;
	if (running_initcall)
		running_initcall->as_initcall += executed - executed_before_initcall;
	executed_before_initcall = executed;
	running_initcall = started;
}

static void report(void)
{
	uint64_t sum = 0;
	FILE *out = fopen(out_path, "w");

	if (!out)
		exit((perror(out_path), 1));
	for (struct block *b = blocks; b; b = b->next) {
		struct function *f = function_at(b->address);
		if (f) {
			f->instructions += b->instructions * b->executed;
			sum += b->instructions * b->executed;
		}
	}
	fprintf(out, "total %lu kernel\n", sum);
	qsort(functions, function_count, sizeof(*functions), by_instructions);
	for (size_t i = 0; i < function_count && functions[i].instructions; i++)
		fprintf(out, "function %lu %s\n", functions[i].instructions, functions[i].name);
	qsort(functions, function_count, sizeof(*functions), by_initcall);
	for (size_t i = 0; i < function_count && functions[i].as_initcall; i++)
		fprintf(out, "initcall %lu %s\n", functions[i].as_initcall, functions[i].name);
	fclose(out);
}

static void init_runs(unsigned vcpu, void *data)
{
	(void)vcpu, (void)data;
	report();
	_exit(0);
}

static void translated(plugin_id id, struct qemu_plugin_tb *tb)
{
	struct block *b = calloc(1, sizeof(*b));

	(void)id;
	b->address = qemu_plugin_tb_vaddr(tb);
	b->instructions = qemu_plugin_tb_n_insns(tb);
	b->next = blocks;
	blocks = b;
	qemu_plugin_register_vcpu_tb_exec_inline(tb, 0 /* add */, &b->executed, 1);
	qemu_plugin_register_vcpu_tb_exec_inline(tb, 0 /* add */, &executed, b->instructions);
	struct function *f = function_at(b->address);
	if (f && f->initcall && f->address == b->address)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, initcall_starts, 0 /* reads no registers */, f);
	if (b->address >= init_start && b->address < init_end)
		qemu_plugin_register_vcpu_tb_exec_cb(tb, init_runs, 0 /* reads no registers */, NULL);
}

__attribute__((visibility("default"))) int qemu_plugin_install(plugin_id id, const void *info, int count, char **arguments)
{
	(void)info;
	for (int i = 0; i < count; i++) {
		if (!strncmp(arguments[i], "map=", 4))
			map_path = strdup(arguments[i] + 4);
		if (!strncmp(arguments[i], "out=", 4))
			out_path = strdup(arguments[i] + 4);
	}
	if (!map_path || !out_path)
		return -1;
	read_map();
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
