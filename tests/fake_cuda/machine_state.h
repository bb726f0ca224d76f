/* What the simulated cards do at this moment, in memory that all processes of the simulated machine map.
 *
 * The file's path is FAKE_CUDA_STATE. The simulated CUDA driver writes it, the simulated NVML driver reads it (C11 and
 * C++20 can both include this, C after #define _GNU_SOURCE). Cards are counted as the machine does, whatever CUDA_VISIBLE_DEVICES leaves a process.
 *
 * Every figure is one aligned 64-bit word that is read and written at once, so that readers need no lock and see no
 * figure half written. Each process writes in a place of its own; two figures of one card may be a moment apart.
 * Places and segments are given out under flock(2) on the file.
 */
#ifndef FAKE_CUDA_MACHINE_STATE_H
#define FAKE_CUDA_MACHINE_STATE_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define FAKE_CUDA_MAX_CARDS 8
#define FAKE_CUDA_MAX_PROCESSES 16
#define FAKE_CUDA_UUID_SIZE 48
#define FAKE_CUDA_NUM_SLICES 32768 /* of a millisecond each: half a minute */
#define FAKE_CUDA_SLICE_NS 1000000
#define FAKE_CUDA_BUSY_BITS 20 /* hold 0 ... FAKE_CUDA_SLICE_NS */
#define FAKE_CUDA_MAGIC UINT64_C(0x3261647563656b66) /* "fkecuda2" */

/* Parts of a card: how much of a millisecond they were in use, in units of FAKE_CUDA_PART_NS. */
enum { FAKE_CUDA_ALL = -1, FAKE_CUDA_MULTIPROCESSORS, FAKE_CUDA_TENSOR_CORES, FAKE_CUDA_MEMORY, FAKE_CUDA_NUM_PARTS };
#define FAKE_CUDA_PART_BITS 15
#define FAKE_CUDA_PART_NS 32
#define FAKE_CUDA_FULL_PART (FAKE_CUDA_SLICE_NS / FAKE_CUDA_PART_NS)

/* What one process does on one card. All counts only grow, and go on with the next process that gets the place. */
struct fake_cuda_share {
    uint64_t has_context; /* 0 or 1; a context takes fake_cuda_card.context_bytes */
    uint64_t reserved_bytes; /* of segments, without the context */
    uint64_t busy_ns; /* time in which a kernel or copy ran on any stream; up to the end of what was launched */
    uint64_t num_launches;
    uint64_t to_card_bytes, to_host_bytes; /* copied over PCIe */
    /* Busy time as a timeline: the word at n % FAKE_CUDA_NUM_SLICES is n << FAKE_CUDA_BUSY_BITS | ns of the n-th
     * millisecond of CLOCK_MONOTONIC in which a kernel or copy runs. A card that lags behind the host has slices in the
     * future. A word with another n has nothing on this millisecond. */
    uint64_t slices[FAKE_CUDA_NUM_SLICES];
    /* The parts of the card in use in that millisecond, of a card that has them (fake_cuda_card.has_parts): 15 bits each,
     * and above them the lower bits of n / FAKE_CUDA_NUM_SLICES + 1. */
    uint64_t parts[FAKE_CUDA_NUM_SLICES];
};

struct fake_cuda_process {
    uint64_t pid; /* 0: nobody's place. The process may have been killed: fake_cuda_is_alive. */
    struct fake_cuda_share cards[FAKE_CUDA_MAX_CARDS];
};

struct fake_cuda_card {
    char uuid[FAKE_CUDA_UUID_SIZE]; /* "GPU-..." */
    uint64_t total_bytes;
    uint64_t context_bytes; /* what a process takes by using the card at all */
    uint64_t others_bytes; /* held by processes that are not simulated */
    uint64_t is_lost; /* fallen off the bus; stays 1 */
    uint64_t has_parts; /* its kernels tell how much of it they use */
    uint64_t throttled_from_ns; /* of CLOCK_MONOTONIC; 0: it is not */
    uint64_t throttled_clock_pct, is_throttled_by_heat; /* else by its power limit */
};

struct fake_cuda_machine {
    uint64_t magic; /* FAKE_CUDA_MAGIC, written last */
    uint64_t num_cards;
    struct fake_cuda_card cards[FAKE_CUDA_MAX_CARDS];
    struct fake_cuda_process processes[FAKE_CUDA_MAX_PROCESSES];
};

static inline uint64_t fake_cuda_load(const uint64_t *word) { return __atomic_load_n(word, __ATOMIC_RELAXED); }
static inline void fake_cuda_store(uint64_t *word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_RELAXED); }

static inline uint64_t fake_cuda_fresh_parts(int64_t n) {
    return (uint64_t)(n / FAKE_CUDA_NUM_SLICES + 1) << (FAKE_CUDA_NUM_PARTS * FAKE_CUDA_PART_BITS);
}
static inline int fake_cuda_is_of(uint64_t word, int64_t n) {
    return (word ^ fake_cuda_fresh_parts(n)) >> (FAKE_CUDA_NUM_PARTS * FAKE_CUDA_PART_BITS) == 0;
}
static inline uint64_t fake_cuda_part(uint64_t word, int part) {
    return word >> (part * FAKE_CUDA_PART_BITS) & ((UINT64_C(1) << FAKE_CUDA_PART_BITS) - 1);
}

static inline int64_t fake_cuda_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static inline void fake_cuda_set_up_machine(struct fake_cuda_machine *machine, int num_cards, uint64_t total_bytes,
                                            uint64_t context_bytes, uint64_t others_bytes) {
    machine->num_cards = (uint64_t)(num_cards < FAKE_CUDA_MAX_CARDS ? num_cards : FAKE_CUDA_MAX_CARDS);
    for (uint64_t i = 0; i < machine->num_cards; i++) {
        struct fake_cuda_card *card = &machine->cards[i];
        snprintf(card->uuid, sizeof card->uuid, "GPU-aaaa1111-0000-0000-0000-%012d", (int)i + 1);
        card->total_bytes = total_bytes;
        card->context_bytes = context_bytes;
        card->others_bytes = others_bytes;
    }
    __atomic_store_n(&machine->magic, FAKE_CUDA_MAGIC, __ATOMIC_RELEASE);
}

/* Maps the machine of that file. A file that is not there yet is made, with these cards.
 *
 * NULL if it can't be had (errno) or is no such file (EINVAL). With num_cards = 0 it is not made: ENOENT.
 * *descriptor, if wanted, stays open for flock.
 */
static inline struct fake_cuda_machine *fake_cuda_open_machine(const char *path, int num_cards, uint64_t total_bytes,
                                                              uint64_t context_bytes, uint64_t others_bytes,
                                                              int *descriptor) {
    struct fake_cuda_machine *machine = NULL;
    struct stat about;
    int file = open(path, O_RDWR | O_CLOEXEC | (num_cards > 0 ? O_CREAT : 0), 0600);
    if (file < 0) return NULL;
    if (flock(file, LOCK_EX) == 0 && fstat(file, &about) == 0) {
        int is_new = about.st_size == 0 && num_cards > 0;
        if (is_new && ftruncate(file, sizeof *machine) == 0) about.st_size = sizeof *machine;
        if (about.st_size == (off_t)sizeof *machine) {
            void *mapped = mmap(NULL, sizeof *machine, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
            if (mapped != MAP_FAILED) machine = (struct fake_cuda_machine *)mapped;
        } else {
            errno = EINVAL;
        }
        if (machine != NULL && is_new) {
            fake_cuda_set_up_machine(machine, num_cards, total_bytes, context_bytes, others_bytes);
        } else if (machine != NULL && machine->magic != FAKE_CUDA_MAGIC) {
            munmap(machine, sizeof *machine);
            machine = NULL;
            errno = EINVAL;
        }
        flock(file, LOCK_UN);
    }
    if (descriptor != NULL && machine != NULL) {
        *descriptor = file;
    } else {
        int error = errno;
        close(file); /* the mapping stays */
        errno = error;
    }
    return machine;
}

/* Whether that process runs. One that was killed does not, though its parent has not asked for it yet (a "zombie"). */
static inline int fake_cuda_is_alive(uint64_t pid) {
    char path[48], text[512];
    if (pid == 0 || (kill((pid_t)pid, 0) != 0 && errno != EPERM)) return 0;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return errno != ENOENT;
    ssize_t size = read(file, text, sizeof text - 1);
    close(file);
    text[size > 0 ? size : 0] = 0;
    const char *name_end = strrchr(text, ')'); /* "pid (name) state ..." */
    return name_end == NULL || name_end[1] == 0 || (name_end[2] != 'Z' && name_end[2] != 'X');
}

/* Bytes of the card that are taken: contexts and segments of processes that live, and what others hold. */
static inline uint64_t fake_cuda_used_bytes(const struct fake_cuda_machine *machine, int card) {
    uint64_t used = machine->cards[card].others_bytes;
    for (int i = 0; i < FAKE_CUDA_MAX_PROCESSES; i++) {
        const struct fake_cuda_share *share = &machine->processes[i].cards[card];
        if (!fake_cuda_load(&share->has_context) || !fake_cuda_is_alive(fake_cuda_load(&machine->processes[i].pid)))
            continue;
        used += machine->cards[card].context_bytes + fake_cuda_load(&share->reserved_bytes);
    }
    return used;
}

/* Of one process in the n-th millisecond. */
static inline int64_t fake_cuda_of_slice(const struct fake_cuda_share *share, int64_t n, int part) {
    if (part == FAKE_CUDA_ALL) {
        uint64_t word = fake_cuda_load(&share->slices[n % FAKE_CUDA_NUM_SLICES]);
        if ((int64_t)(word >> FAKE_CUDA_BUSY_BITS) != n) return 0;
        return (int64_t)(word & ((UINT64_C(1) << FAKE_CUDA_BUSY_BITS) - 1));
    }
    uint64_t word = fake_cuda_load(&share->parts[n % FAKE_CUDA_NUM_SLICES]);
    return fake_cuda_is_of(word, n) ? (int64_t)fake_cuda_part(word, part) * FAKE_CUDA_PART_NS : 0;
}

/* Nanoseconds between two times of CLOCK_MONOTONIC in which a part of the card was in use, or with FAKE_CUDA_ALL the
 * card was busy; at most to_ns - from_ns.
 *
 * Exact to a millisecond at both ends. Where two processes are busy within one millisecond, their times are added up to
 * that millisecond. Only the last half minute is known; give a to_ns that lies in the past.
 */
static inline int64_t fake_cuda_used_ns(const struct fake_cuda_machine *machine, int card, int part, int64_t from_ns,
                                        int64_t to_ns) {
    double busy = 0;
    int64_t oldest = to_ns - (int64_t)FAKE_CUDA_NUM_SLICES * FAKE_CUDA_SLICE_NS;
    if (from_ns < oldest) from_ns = oldest;
    if (from_ns < 0) from_ns = 0;
    for (int64_t n = from_ns / FAKE_CUDA_SLICE_NS; n * FAKE_CUDA_SLICE_NS < to_ns; n++) {
        int64_t begin = n * FAKE_CUDA_SLICE_NS, end = begin + FAKE_CUDA_SLICE_NS;
        int64_t of_slice = 0;
        for (int i = 0; i < FAKE_CUDA_MAX_PROCESSES; i++) {
            const struct fake_cuda_share *share = &machine->processes[i].cards[card];
            if (!fake_cuda_load(&share->num_launches)) continue;
            of_slice += fake_cuda_of_slice(share, n, part);
        }
        if (of_slice > FAKE_CUDA_SLICE_NS) of_slice = FAKE_CUDA_SLICE_NS;
        if (begin < from_ns) begin = from_ns;
        if (end > to_ns) end = to_ns;
        busy += (double)of_slice * (double)(end - begin) / FAKE_CUDA_SLICE_NS;
    }
    return (int64_t)busy;
}
static inline int64_t fake_cuda_busy_ns(const struct fake_cuda_machine *machine, int card, int64_t from_ns,
                                        int64_t to_ns) {
    return fake_cuda_used_ns(machine, card, FAKE_CUDA_ALL, from_ns, to_ns);
}

/* Sums over all processes of the machine, those that have ended too. */
static inline uint64_t fake_cuda_total_busy_ns(const struct fake_cuda_machine *machine, int card) {
    uint64_t busy_ns = 0;
    for (int i = 0; i < FAKE_CUDA_MAX_PROCESSES; i++)
        busy_ns += fake_cuda_load(&machine->processes[i].cards[card].busy_ns);
    return busy_ns;
}
static inline uint64_t fake_cuda_to_card_bytes(const struct fake_cuda_machine *machine, int card) {
    uint64_t bytes = 0;
    for (int i = 0; i < FAKE_CUDA_MAX_PROCESSES; i++)
        bytes += fake_cuda_load(&machine->processes[i].cards[card].to_card_bytes);
    return bytes;
}
static inline uint64_t fake_cuda_to_host_bytes(const struct fake_cuda_machine *machine, int card) {
    uint64_t bytes = 0;
    for (int i = 0; i < FAKE_CUDA_MAX_PROCESSES; i++)
        bytes += fake_cuda_load(&machine->processes[i].cards[card].to_host_bytes);
    return bytes;
}

#endif
