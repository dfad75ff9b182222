/*
 * Writes a kernel image with nothing in it but what a loader has to read: pack VMLINUX PACKED
 *
 * The linker aligns text, read-only data and data to 2 MiB and fills the gaps with zeros, and there are zeros
 * inside data as well. Inside of text the gaps are larger: what a process's page tables keep mapped begins and ends at
 * 2 MiB, and a mitigation wants a function at a certain distance (arch/x86/kernel/vmlinux.lds.S); they are filled with
 * breakpoints. The packed image loads to the same code and data at the same addresses: each run of pages of zeros, or of
 * breakpoints, becomes the end of the segment before it, which is zero by the rules of ELF (memory size beyond the
 * file size). What remains of a gap in a page with code stays as it is. Sections and symbols are dropped; the PVH note
 * stays. File offsets keep their place within a page, so that the image can be mapped as well as read.
 */
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAGE 4096UL
/* A gap of fewer pages is not worth a segment of its own. */
#define WORTH 8UL
#define SEGMENTS_MAX 256

static void fail(const char *what)
{
	fprintf(stderr, "pack: %s\n", what);
	exit(1);
}

static unsigned char *contents(const char *path, size_t *size)
{
	FILE *file = fopen(path, "rb");

	if (!file || fseek(file, 0, SEEK_END))
		fail("Cannot read the kernel");
	*size = ftell(file);
	rewind(file);
	unsigned char *image = malloc(*size);
	if (!image || fread(image, 1, *size, file) != *size)
		fail("Cannot read the kernel");
	fclose(file);
	return image;
}

/* A breakpoint, with which the linker fills gaps in text. */
#define INT3 0xcc

static int is_filling(const unsigned char *from, size_t length)
{
	return length == 0 || ((*from == 0 || *from == INT3) && !memcmp(from, from + 1, length - 1));
}

static Elf64_Phdr segments[SEGMENTS_MAX];
static const unsigned char *sources[SEGMENTS_MAX];
static size_t count;

static void add(const Elf64_Phdr *whole, const unsigned char *data, size_t from, size_t file_size, size_t memory_size)
{
	if (count == SEGMENTS_MAX)
		fail("The kernel has too many gaps");
	segments[count] = *whole;
	segments[count].p_vaddr += from;
	segments[count].p_paddr += from;
	segments[count].p_filesz = file_size;
	segments[count].p_memsz = memory_size;
	segments[count].p_align = PAGE;
	sources[count++] = data + from;
}

/* Cuts a segment behind each run of pages of filling that is long enough. */
static void split(const Elf64_Phdr *whole, const unsigned char *data)
{
	size_t start = 0, end_of_data = 0, at = 0;

	while (at < whole->p_filesz) {
		size_t step = PAGE - (whole->p_paddr + at) % PAGE;
		if (step > whole->p_filesz - at)
			step = whole->p_filesz - at;
		if (!is_filling(data + at, step)) {
			if (at - end_of_data >= WORTH * PAGE) {
				add(whole, data, start, end_of_data - start, at - start);
				start = at;
			}
			end_of_data = at + step;
		}
		at += step;
	}
	add(whole, data, start, end_of_data - start, whole->p_memsz - start);
}

int main(int argc, char **argv)
{
	size_t size;

	if (argc != 3)
		fail("Usage: pack VMLINUX PACKED");
	unsigned char *image = contents(argv[1], &size);
	Elf64_Ehdr header = *(Elf64_Ehdr *)image;
	Elf64_Phdr *old = (Elf64_Phdr *)(image + header.e_phoff), note = {0};
	for (size_t i = 0; i < header.e_phnum; i++) {
		if (old[i].p_type == PT_LOAD)
			split(&old[i], image + old[i].p_offset);
		else if (old[i].p_type == PT_NOTE)
			note = old[i];
	}
	if (!note.p_filesz)
		fail("The kernel has no notes: is CONFIG_PVH on?");

	/* Segments follow the headers, each at the next offset with the same place in a page as its address. */
	size_t offset = sizeof(header) + (count + 1) * sizeof(Elf64_Phdr);
	for (size_t i = 0; i < count; i++) {
		offset += (segments[i].p_paddr - offset) % PAGE;
		segments[i].p_offset = offset;
		offset += segments[i].p_filesz;
		if (note.p_paddr >= segments[i].p_paddr &&
		    note.p_paddr + note.p_filesz <= segments[i].p_paddr + segments[i].p_filesz)
			note.p_offset = segments[i].p_offset + note.p_paddr - segments[i].p_paddr;
	}
	header.e_phoff = sizeof(header);
	header.e_phnum = count + 1;
	header.e_shoff = header.e_shnum = header.e_shstrndx = 0;

	FILE *out = fopen(argv[2], "wb");
	int bad = !out || fwrite(&header, sizeof(header), 1, out) != 1 ||
		  fwrite(segments, sizeof(*segments), count, out) != count || fwrite(&note, sizeof(note), 1, out) != 1;
	for (size_t i = 0; i < count && !bad; i++)
		bad = fseek(out, segments[i].p_offset, SEEK_SET) ||
		      fwrite(sources[i], 1, segments[i].p_filesz, out) != segments[i].p_filesz;
	if (bad || fclose(out))
		fail("Cannot write the packed kernel");
	return 0;
}
