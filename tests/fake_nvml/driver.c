/* A stand-in for libnvidia-ml.so.1 that answers what a scenario file says, so that the real pynvml runs without a GPU.
 *
 * driver.py writes the scenario, builds this file and lists what a scenario can say. The file is read at every
 * nvmlInit that takes the count of users from 0 to 1; its path is FAKE_NVML_SCENARIO or what fake_nvml_load was given.
 *
 * Structures are those of pynvml 13.615's ctypes definitions; error codes, what a function answers to bad arguments and
 * what MIG devices refuse follow https://docs.nvidia.com/deploy/nvml-api. Times in a scenario are seconds since the
 * first nvmlInit. All state is behind one lock, and no call sleeps while it holds it.
 *
 * A device with `simulated N` is the N-th card (from 1) of the simulated CUDA machine in the file FAKE_CUDA_STATE: busy,
 * memory, processes, PCIe and loss are what that card does. Power and clocks are modelled from how busy it is.
 */
#define _GNU_SOURCE
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../fake_cuda/machine_state.h"

#define EXPORT __attribute__((visibility("default")))
#define COUNT(table) (sizeof(table) / sizeof((table)[0]))

enum { MAX_DEVICES = 64, MAX_RULES = 48, MAX_METRICS = 24, MAX_PROCESSES = 8, MAX_HANGS = 8, MAX_FUNCTIONS = 64,
       MAX_GPM_SAMPLES = 256, MAX_MIG_SLOTS = 7, TEXT = 96 };

/* ---- NVML's types ---- */

typedef unsigned int nvmlReturn_t;
typedef struct handle *nvmlDevice_t;
typedef struct gpm_sample *nvmlGpmSample_t;

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, OUT_OF_MEMORY = 20, NO_DATA = 21, VERSION_MISMATCH = 25 };

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
typedef struct { unsigned int gpu, memory; } nvmlUtilization_t;
typedef struct { unsigned int version, sensorType; int temperature; } nvmlTemperature_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
    unsigned int metricId;
    nvmlReturn_t nvmlReturn;
    double value;
    struct { const char *shortName, *longName, *unit; } metricInfo;
} nvmlGpmMetric_t;
typedef struct {
    unsigned int version, numMetrics;
    nvmlGpmSample_t sample1, sample2;
    nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;

enum { MEMORY_V2 = 0x02000028, TEMPERATURE_V1 = 0x100000C, GPM_VERSION = 1,
       CLOCK_MEM = 2, PCIE_TX = 0, PCIE_RX = 1, NO_INSTANCE = 0xFFFFFFFF };

enum { POWER_CAP = 0x4, THERMAL_SLOWDOWN = 0x20 }; /* nvmlClocksEventReason: SwPowerCap, SwThermalSlowdown */
enum { RESTING_CLOCK = 5 }; /* a simulated card that has done nothing for a second runs at this part of its clock */

_Static_assert(sizeof(nvmlMemory_v2_t) == (MEMORY_V2 & 0xFFFFFF), "nvmlMemory_v2_t");
_Static_assert(sizeof(nvmlTemperature_t) == (TEMPERATURE_V1 & 0xFFFFFF), "nvmlTemperature_t");

/* ---- What a scenario says ---- */

struct wave { double period_s, duty, low, high; };                    /* high for the first duty of each period */
struct rule { char function[TEXT]; int code; double from_s, to_s; };  /* code 0: answers, whatever the default is */
struct metric { int id; double scale; int code; };
struct process { int pid; uint64_t used_bytes; char name[TEXT]; };
struct hang { char function[TEXT]; double for_s, from_s; int once; };

struct device {
    char uuid[TEXT], name[TEXT];
    int parent, slot; /* of a MIG instance; parent is -1 for a card */
    int mig_mode, mig_capable, gpu_instance_id, compute_instance_id;
    int simulated; /* number of the card in the simulated machine, from 1; 0 = the scenario says it all */
    uint64_t total_bytes, used_bytes, reserved_bytes;
    int major, minor;
    struct wave util, memory_util, power_w;
    double energy_start_j, power_limit_w; /* 0: it does not tell its limit */
    int temp_c, sm_clock_mhz, mem_clock_mhz, pcie_rx_kb_s, pcie_tx_kb_s;
    int pcie_generation, pcie_width, max_pcie_generation, max_pcie_width;
    uint64_t event_reasons;
    int has_energy, gpm;
    double lost_from_s, lost_to_s;
    int lost_needs_init;
    struct rule rules[MAX_RULES];
    struct metric metrics[MAX_METRICS];
    struct process processes[MAX_PROCESSES];
    int num_rules, num_metrics, num_processes;
    double asked_at_s; /* not in the file: when the call came that has this copy */
};

struct scenario {
    char driver[TEXT], nvml[TEXT];
    int init_error, fail_every, fail_code;
    double slow_ms, slow_from_s, rate_period_s;
    struct rule rules[MAX_RULES];
    struct hang hangs[MAX_HANGS];
    struct device devices[MAX_DEVICES];
    int num_rules, num_hangs, num_devices;
};

enum kind { IS_TEXT, IS_INT, IS_U64, IS_REAL, IS_WAVE };
struct field { const char *key; enum kind kind; size_t offset; };

#define SCENARIO(member, kind) { #member, kind, offsetof(struct scenario, member) }
static const struct field SCENARIO_FIELDS[] = {
    SCENARIO(driver, IS_TEXT),     SCENARIO(nvml, IS_TEXT),        SCENARIO(init_error, IS_INT),
    SCENARIO(fail_every, IS_INT),  SCENARIO(fail_code, IS_INT),
    SCENARIO(slow_ms, IS_REAL),    SCENARIO(slow_from_s, IS_REAL), SCENARIO(rate_period_s, IS_REAL),
};

#define DEVICE(member, kind) { #member, kind, offsetof(struct device, member) }
static const struct field DEVICE_FIELDS[] = {
    DEVICE(name, IS_TEXT),            DEVICE(mig_mode, IS_INT),            DEVICE(mig_capable, IS_INT),
    DEVICE(slot, IS_INT),             DEVICE(gpu_instance_id, IS_INT),     DEVICE(compute_instance_id, IS_INT),
    DEVICE(total_bytes, IS_U64),      DEVICE(used_bytes, IS_U64),          DEVICE(reserved_bytes, IS_U64),
    DEVICE(major, IS_INT),            DEVICE(minor, IS_INT),               DEVICE(util, IS_WAVE),
    DEVICE(memory_util, IS_WAVE),     DEVICE(power_w, IS_WAVE),            DEVICE(energy_start_j, IS_REAL),
    DEVICE(temp_c, IS_INT),           DEVICE(sm_clock_mhz, IS_INT),        DEVICE(mem_clock_mhz, IS_INT),
    DEVICE(pcie_rx_kb_s, IS_INT),     DEVICE(pcie_tx_kb_s, IS_INT),        DEVICE(event_reasons, IS_U64),
    DEVICE(pcie_generation, IS_INT),  DEVICE(max_pcie_generation, IS_INT), DEVICE(pcie_width, IS_INT),
    DEVICE(max_pcie_width, IS_INT),   DEVICE(has_energy, IS_INT),          DEVICE(gpm, IS_INT),
    DEVICE(lost_from_s, IS_REAL),
    DEVICE(lost_to_s, IS_REAL),       DEVICE(lost_needs_init, IS_INT),     DEVICE(simulated, IS_INT),
    DEVICE(power_limit_w, IS_REAL),
};

static int set_value(enum kind kind, void *to, const char *text) {
    char *end = NULL;
    switch (kind) {
    case IS_TEXT: return snprintf(to, TEXT, "%s", text) < TEXT;
    case IS_INT: *(int *)to = (int)strtol(text, &end, 10); break;
    case IS_U64: *(uint64_t *)to = strtoull(text, &end, 10); break;
    case IS_REAL: *(double *)to = strtod(text, &end); break;
    case IS_WAVE: {
        struct wave *wave = to;
        return sscanf(text, "%lf %lf %lf %lf", &wave->period_s, &wave->duty, &wave->low, &wave->high) == 4;
    }
    }
    return end != NULL && end != text && *end == '\0';
}

static int set_field(const struct field *fields, size_t num, void *owner, const char *key, const char *text) {
    for (size_t i = 0; i < num; i++)
        if (strcmp(fields[i].key, key) == 0) return set_value(fields[i].kind, (char *)owner + fields[i].offset, text);
    return 0;
}

static int add_device(struct scenario *s, const char *uuid, int is_mig) {
    if (s->num_devices == MAX_DEVICES) return 0;
    int parent = -1;
    for (int i = 0; is_mig && i < s->num_devices; i++)
        if (s->devices[i].parent == -1) parent = i; /* the last card */
    if (is_mig && parent == -1) return 0;
    struct device *d = &s->devices[s->num_devices++];
    d->parent = parent;
    d->lost_from_s = d->lost_to_s = INFINITY;
    return set_value(IS_TEXT, d->uuid, uuid);
}

static int add_rule(struct rule *rules, int *num, const char *text) {
    if (*num == MAX_RULES) return 0;
    struct rule *r = &rules[(*num)++];
    return sscanf(text, "%95s %d %lf %lf", r->function, &r->code, &r->from_s, &r->to_s) == 4;
}

/* One line of the file. Lines after `gpu UUID` or `mig UUID` are about that device. 0: not understood. */
static int read_line(struct scenario *s, const char *key, const char *text) {
    struct device *d = s->num_devices ? &s->devices[s->num_devices - 1] : NULL;
    if (strcmp(key, "gpu") == 0 || strcmp(key, "mig") == 0) return add_device(s, text, key[0] == 'm');
    if (strcmp(key, "error") == 0)
        return d ? add_rule(d->rules, &d->num_rules, text) : add_rule(s->rules, &s->num_rules, text);
    if (strcmp(key, "hang") == 0 && s->num_hangs < MAX_HANGS) {
        struct hang *h = &s->hangs[s->num_hangs++];
        return sscanf(text, "%95s %lf %lf %d", h->function, &h->for_s, &h->from_s, &h->once) == 4;
    }
    if (d == NULL) return set_field(SCENARIO_FIELDS, COUNT(SCENARIO_FIELDS), s, key, text);
    if (strcmp(key, "metric") == 0 && d->num_metrics < MAX_METRICS) {
        struct metric *m = &d->metrics[d->num_metrics++];
        return sscanf(text, "%d %lf %d", &m->id, &m->scale, &m->code) == 3;
    }
    if (strcmp(key, "process") == 0 && d->num_processes < MAX_PROCESSES) {
        struct process *p = &d->processes[d->num_processes++];
        return sscanf(text, "%d %" SCNu64 " %95[^\n]", &p->pid, &p->used_bytes, p->name) >= 2;
    }
    return set_field(DEVICE_FIELDS, COUNT(DEVICE_FIELDS), d, key, text);
}

static nvmlReturn_t read_scenario(const char *path, struct scenario *s) {
    FILE *file = path ? fopen(path, "r") : NULL;
    if (file == NULL) {
        fprintf(stderr, "fake NVML: no scenario (FAKE_NVML_SCENARIO=%s)\n", path ? path : "(not set)");
        return DRIVER_NOT_LOADED;
    }
    memset(s, 0, sizeof *s);
    char line[512];
    nvmlReturn_t result = SUCCESS;
    while (result == SUCCESS && fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = '\0';
        char *text = strchr(line, ' ');
        if (text) *text++ = '\0';
        if (text == NULL || !read_line(s, line, text)) {
            fprintf(stderr, "fake NVML: %s: not understood: %s %s\n", path, line, text ? text : "");
            result = INVALID_ARGUMENT;
        }
    }
    fclose(file);
    return result;
}

/* ---- State ---- */

struct handle { int unused; }; /* a handle is the address of its device's entry: valid whatever scenario comes */
struct gpm_sample { int used, taken, device; double at_s; uint64_t to_card_bytes, to_host_bytes; };
struct calls { char function[TEXT]; unsigned long count; };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct scenario now_played;
static struct handle handles[MAX_DEVICES];
static struct gpm_sample gpm_samples[MAX_GPM_SAMPLES];
static struct calls calls[MAX_FUNCTIONS];
static char loaded_path[4096];
static int num_users, started, hang_is_over[MAX_HANGS];
static unsigned long num_device_calls;
static double started_at_s, advanced_s, init_s;
static struct fake_cuda_machine *machine; /* the simulated one; NULL until a scenario speaks of it */
static struct { int64_t at_ns; uint64_t bytes; } pcie_before[FAKE_CUDA_MAX_CARDS][2];

static double clock_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double elapsed_s(void) { return started ? clock_s() - started_at_s + advanced_s : 0.0; }

static void sleep_for(double seconds) {
    struct timespec t = { (time_t)seconds, (long)(1e9 * (seconds - floor(seconds))) };
    while (seconds > 0 && nanosleep(&t, &t) != 0) {}
}

static double wave_at(const struct wave *w, double t) {
    double phase = t / w->period_s - floor(t / w->period_s);
    return phase < w->duty ? w->high : w->low;
}

static double wave_integral(const struct wave *w, double t) {
    double periods = floor(t / w->period_s), phase = t / w->period_s - periods;
    double of_period = w->duty * w->high + (1 - w->duty) * w->low;
    double of_rest = phase < w->duty ? phase * w->high : w->duty * w->high + (phase - w->duty) * w->low;
    return w->period_s * (periods * of_period + of_rest);
}

/* ---- A device that is a card of the simulated machine ---- */

/* Whether the machine is there. The file appears when the first process uses its cards. */
static int is_simulated(const struct device *d) {
    if (d->simulated == 0) return 0;
    const char *path = getenv("FAKE_CUDA_STATE");
    if (machine == NULL && path != NULL) machine = fake_cuda_open_machine(path, 0, 0, 0, 0, NULL);
    return machine != NULL;
}

static int64_t ns_of(double t) { return (int64_t)(1e9 * (started_at_s + t - advanced_s)); }

/* Percent of the time between two moments in which a part of the card, or with FAKE_CUDA_ALL the card, was in use. */
static double used_pct(const struct device *d, int part, double from_s, double to_s) {
    if (!is_simulated(d) || to_s <= from_s) return 0;
    double used_s = 1e-9 * (double)fake_cuda_used_ns(machine, d->simulated - 1, part, ns_of(from_s), ns_of(to_s));
    return fmin(100, 100 * used_s / (to_s - from_s));
}

static double busy_pct(const struct device *d, double from_s, double to_s) {
    return used_pct(d, FAKE_CUDA_ALL, from_s, to_s);
}

/* Up to a moment near the present, without what has been launched and will run later. */
static double busy_since_start_s(const struct device *d, double t) {
    if (!is_simulated(d)) return 0;
    int64_t busy_ns = (int64_t)fake_cuda_total_busy_ns(machine, d->simulated - 1);
    int64_t half_known_ns = (int64_t)FAKE_CUDA_NUM_SLICES * FAKE_CUDA_SLICE_NS / 2;
    busy_ns -= fake_cuda_busy_ns(machine, d->simulated - 1, ns_of(t), ns_of(t) + half_known_ns);
    return 1e-9 * (double)(busy_ns > 0 ? busy_ns : 0);
}

/* What the driver shows at a moment: of a simulated card the mean of the time up to it, scaled to 0 ... `high`. */
static double shown_at(const struct device *d, const struct wave *wave, double t) {
    if (d->simulated == 0) return wave_at(wave, t);
    return wave->low + (wave->high - wave->low) * busy_pct(d, t - now_played.rate_period_s, t) / 100;
}

/* The integral of what is shown over the time from the start. */
static double energy_j(const struct device *d, double t) {
    if (d->simulated == 0) return d->energy_start_j + wave_integral(&d->power_w, t);
    return d->energy_start_j + d->power_w.low * t + (d->power_w.high - d->power_w.low) * busy_since_start_s(d, t);
}

/* Bytes since the last time that this was asked, as KB/s. */
static double pcie_kb_s(const struct device *d, int is_to_card) {
    if (!is_simulated(d)) return 0;
    int card = d->simulated - 1;
    int64_t now_ns = fake_cuda_now_ns(), before_ns = pcie_before[card][is_to_card].at_ns;
    uint64_t bytes = is_to_card ? fake_cuda_to_card_bytes(machine, card) : fake_cuda_to_host_bytes(machine, card);
    uint64_t before = pcie_before[card][is_to_card].bytes;
    pcie_before[card][is_to_card].at_ns = now_ns;
    pcie_before[card][is_to_card].bytes = bytes;
    return before_ns ? 1e6 * (double)(bytes - before) / (double)(now_ns - before_ns) : 0;
}

/* Puts the card's memory, processes and throttling into what the scenario says of the device. */
static void look_at_card(struct device *d) {
    if (!is_simulated(d)) return;
    int card = d->simulated - 1;
    uint64_t throttled_from_ns = fake_cuda_load(&machine->cards[card].throttled_from_ns);
    if (throttled_from_ns && (int64_t)throttled_from_ns <= ns_of(d->asked_at_s) &&
        busy_pct(d, d->asked_at_s - 1, d->asked_at_s) > 0) {
        d->sm_clock_mhz = d->sm_clock_mhz * (int)fake_cuda_load(&machine->cards[card].throttled_clock_pct) / 100;
        d->event_reasons |= fake_cuda_load(&machine->cards[card].is_throttled_by_heat) ? THERMAL_SLOWDOWN : POWER_CAP;
    }
    d->total_bytes = machine->cards[card].total_bytes;
    d->used_bytes = fake_cuda_used_bytes(machine, card);
    d->num_processes = 0;
    for (int i = 0; i < FAKE_CUDA_MAX_PROCESSES && d->num_processes < MAX_PROCESSES; i++) {
        const struct fake_cuda_process *process = &machine->processes[i];
        uint64_t pid = fake_cuda_load(&process->pid);
        if (!fake_cuda_load(&process->cards[card].has_context) || !fake_cuda_is_alive(pid)) continue;
        uint64_t held = machine->cards[card].context_bytes + fake_cuda_load(&process->cards[card].reserved_bytes);
        d->processes[d->num_processes++] = (struct process){ .pid = (int)pid, .used_bytes = held };
    }
}

static int is_lost(const struct device *d, double t) {
    if (d->parent >= 0) d = &now_played.devices[d->parent];
    if (is_simulated(d) && fake_cuda_load(&machine->cards[d->simulated - 1].is_lost)) return 1;
    return t >= d->lost_from_s && (t < d->lost_to_s || (d->lost_needs_init && init_s < d->lost_to_s));
}

static const struct rule *rule_for(const struct rule *rules, int num, const char *function, double t) {
    for (int i = 0; i < num; i++)
        if (strcmp(rules[i].function, function) == 0 && t >= rules[i].from_s && t < rules[i].to_s) return &rules[i];
    return NULL;
}

static int is_among(const char *const *names, size_t num, const char *name) {
    for (size_t i = 0; i < num; i++)
        if (strcmp(names[i], name) == 0) return 1;
    return 0;
}

/* What the handle of a MIG instance answers; its card answers the rest. */
static const char *const MIG_ANSWERS[] = {
    "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMigDeviceHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName",
    "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
    "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetComputeRunningProcesses_v2", "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetGraphicsRunningProcesses_v3",
};
/* What a card in MIG mode refuses. */
static const char *const SPLIT_REFUSES[] = { "nvmlDeviceGetUtilizationRates" };

/* ---- Every call passes here ---- */

static void count_call(const char *function) {
    for (size_t i = 0; i < COUNT(calls); i++) {
        if (calls[i].count == 0) snprintf(calls[i].function, TEXT, "%s", function);
        if (strcmp(calls[i].function, function) == 0) {
            calls[i].count++;
            return;
        }
    }
}

/* Counts the call, then takes as long as the scenario says. */
static void take_time(const char *function, int about_device) {
    double wait_s = 0;
    pthread_mutex_lock(&lock);
    count_call(function);
    double t = elapsed_s();
    if (about_device && t >= now_played.slow_from_s) wait_s += now_played.slow_ms / 1e3;
    for (int i = 0; i < now_played.num_hangs; i++) {
        const struct hang *h = &now_played.hangs[i];
        if (strcmp(h->function, function) != 0 || t < h->from_s || hang_is_over[i]) continue;
        hang_is_over[i] = h->once;
        wait_s += h->for_s;
    }
    pthread_mutex_unlock(&lock);
    sleep_for(wait_s);
}

/* For calls about no device: SUCCESS with the lock HELD, or the refusal without it. */
static nvmlReturn_t enter(const char *function) {
    take_time(function, 0);
    pthread_mutex_lock(&lock);
    const struct rule *rule = rule_for(now_played.rules, now_played.num_rules, function, elapsed_s());
    nvmlReturn_t result = num_users == 0 ? UNINITIALIZED : rule ? (nvmlReturn_t)rule->code : SUCCESS;
    if (result != SUCCESS) pthread_mutex_unlock(&lock);
    return result;
}

/* What stands against any call about a device; the lock is held. */
static nvmlReturn_t stumble(void) {
    if (num_users == 0) return UNINITIALIZED;
    if (now_played.fail_every == 0 || ++num_device_calls % (unsigned long)now_played.fail_every != 0) return SUCCESS;
    return (nvmlReturn_t)now_played.fail_code;
}

/* What stands against answering for this device; the lock is held. */
static nvmlReturn_t refusal(const char *function, const struct device *d) {
    double t = elapsed_s();
    if (is_lost(d, t)) return GPU_IS_LOST;
    const struct rule *rule = rule_for(d->rules, d->num_rules, function, t);
    if (rule == NULL) rule = rule_for(now_played.rules, now_played.num_rules, function, t);
    if (rule) return (nvmlReturn_t)rule->code;
    if (d->parent >= 0 && !is_among(MIG_ANSWERS, COUNT(MIG_ANSWERS), function)) return NOT_SUPPORTED;
    if (d->mig_mode && is_among(SPLIT_REFUSES, COUNT(SPLIT_REFUSES), function)) return NOT_SUPPORTED;
    return SUCCESS;
}

/* For calls about a device: SUCCESS and a copy of what the scenario says of it, or the refusal. */
static nvmlReturn_t ask(const char *function, nvmlDevice_t handle, struct device *copy) {
    take_time(function, 1);
    pthread_mutex_lock(&lock);
    ptrdiff_t index = handle - handles;
    nvmlReturn_t result = stumble();
    if (result == SUCCESS) {
        int known = handle != NULL && index >= 0 && index < now_played.num_devices;
        result = known ? refusal(function, &now_played.devices[index]) : INVALID_ARGUMENT;
        if (result == SUCCESS) {
            *copy = now_played.devices[index];
            copy->asked_at_s = elapsed_s();
            look_at_card(copy);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* In a function about a device: `d` is what the scenario says of it. */
#define ASK(d, handle) \
    struct device d; \
    nvmlReturn_t refused = ask(__func__, handle, &d); \
    if (refused != SUCCESS) return refused

/* The handle of the first device that `fits`, for the functions that look one up; the lock is not held. */
typedef int fits_t(const struct device *d, int card_number, const void *wanted);

static nvmlReturn_t look_up(const char *function, fits_t *fits, const void *wanted, nvmlDevice_t *found,
                            nvmlReturn_t if_none) {
    take_time(function, 1);
    pthread_mutex_lock(&lock);
    nvmlReturn_t stumbled = stumble(), result = stumbled ? stumbled : if_none;
    int card_number = -1;
    for (int i = 0; !stumbled && i < now_played.num_devices; i++) {
        const struct device *d = &now_played.devices[i];
        card_number += d->parent == -1;
        if (!fits(d, card_number, wanted)) continue;
        result = refusal(function, d);
        if (result == SUCCESS) *found = &handles[i];
        break;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- The library as a whole ---- */

/* Reads the scenario if nobody uses the library yet, and starts its clock. */
static nvmlReturn_t open_scenario(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = SUCCESS;
    if (num_users == 0) result = read_scenario(loaded_path[0] ? loaded_path : getenv("FAKE_NVML_SCENARIO"), &now_played);
    if (result == SUCCESS && !started) {
        started_at_s = clock_s();
        started = 1;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

static nvmlReturn_t init(const char *function) {
    nvmlReturn_t result = open_scenario();
    take_time(function, 0); /* after the scenario is read: it may say that nvmlInit hangs */
    if (result != SUCCESS) return result;
    pthread_mutex_lock(&lock);
    result = (nvmlReturn_t)now_played.init_error;
    if (result == SUCCESS && num_users++ == 0) init_s = elapsed_s();
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void) { return init(__func__); }

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    return init(__func__);
}

EXPORT nvmlReturn_t nvmlShutdown(void) {
    nvmlReturn_t refused = enter(__func__);
    if (refused != SUCCESS) return refused;
    num_users--;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) {
    static const struct { nvmlReturn_t code; const char *text; } TEXTS[] = {
        { 0, "Success" }, { 1, "Uninitialized" }, { 2, "Invalid Argument" }, { 3, "Not Supported" },
        { 4, "Insufficient Permissions" }, { 6, "Not Found" }, { 7, "Insufficient Size" },
        { 9, "Driver Not Loaded" }, { 10, "Timeout" }, { 12, "NVML Shared Library Not Found" },
        { 13, "Function Not Found" }, { 15, "GPU is lost" }, { 16, "GPU requires restart" },
        { 18, "Driver/library version mismatch" }, { 20, "Insufficient Memory" }, { 21, "No data" },
        { 25, "Argument Version Mismatch" }, { 999, "Unknown Error" },
    };
    for (size_t i = 0; i < COUNT(TEXTS); i++)
        if (TEXTS[i].code == code) return TEXTS[i].text;
    return "Unknown Error";
}

static nvmlReturn_t copy_text(const char *text, char *to, unsigned int length) {
    if (strlen(text) >= length) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    nvmlReturn_t result = enter(__func__);
    if (result != SUCCESS) return result;
    result = copy_text(now_played.driver, version, length);
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length) {
    nvmlReturn_t result = enter(__func__);
    if (result != SUCCESS) return result;
    result = copy_text(now_played.nvml, version, length);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- Finding devices ---- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t refused = enter(__func__);
    if (refused != SUCCESS) return refused;
    *count = 0;
    for (int i = 0; i < now_played.num_devices; i++) *count += now_played.devices[i].parent == -1;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

static int fits_number(const struct device *d, int card_number, const void *wanted) {
    return d->parent == -1 && card_number == (int)*(const unsigned int *)wanted;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    return look_up(__func__, fits_number, &index, device, INVALID_ARGUMENT);
}

static int fits_uuid(const struct device *d, int card_number, const void *wanted) {
    (void)card_number;
    return strcmp(d->uuid, wanted) == 0;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    return look_up(__func__, fits_uuid, uuid, device, NOT_FOUND);
}

static int fits_slot(const struct device *d, int card_number, const void *wanted) {
    (void)card_number;
    const int *parent_and_slot = wanted;
    return d->parent == parent_and_slot[0] && d->slot == parent_and_slot[1];
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
    int parent_and_slot[] = { (int)(device - handles), (int)index };
    return index < MAX_MIG_SLOTS ? look_up(__func__, fits_slot, parent_and_slot, mig, NOT_FOUND) : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig, nvmlDevice_t *device) {
    ASK(d, mig);
    if (d.parent == -1) return INVALID_ARGUMENT;
    *device = &handles[d.parent];
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig) {
    ASK(d, device);
    *is_mig = d.parent >= 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    ASK(d, device);
    if (!d.mig_capable) return NOT_SUPPORTED;
    *current = *pending = (unsigned int)d.mig_mode;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count) {
    ASK(d, device);
    *count = d.mig_capable ? MAX_MIG_SLOTS : 0;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id) {
    ASK(d, device);
    *id = (unsigned int)d.gpu_instance_id;
    return d.parent >= 0 ? SUCCESS : NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id) {
    ASK(d, device);
    *id = (unsigned int)d.compute_instance_id;
    return d.parent >= 0 ? SUCCESS : NOT_SUPPORTED;
}

/* ---- What a device is ---- */

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    ASK(d, device);
    return copy_text(d.uuid, uuid, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    ASK(d, device);
    return copy_text(d.name, name, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    ASK(d, device);
    *major = d.major;
    *minor = d.minor;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ASK(d, device);
    memory->total = d.total_bytes;
    memory->used = d.used_bytes + d.reserved_bytes; /* version 1 has no field for the reserve */
    memory->free = d.total_bytes - memory->used;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ASK(d, device);
    if (memory->version != MEMORY_V2) return VERSION_MISMATCH;
    memory->total = d.total_bytes;
    memory->reserved = d.reserved_bytes;
    memory->used = d.used_bytes;
    memory->free = d.total_bytes - d.used_bytes - d.reserved_bytes;
    return SUCCESS;
}

static nvmlReturn_t running_processes(const struct device *d, unsigned int *count, nvmlProcessInfo_t *infos) {
    unsigned int room = *count, num = (unsigned int)d->num_processes;
    *count = num;
    if (num > room) return INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < num; i++) {
        unsigned int instance = d->parent >= 0 ? (unsigned int)d->gpu_instance_id : NO_INSTANCE;
        infos[i] = (nvmlProcessInfo_t){ (unsigned int)d->processes[i].pid, d->processes[i].used_bytes, instance, instance };
    }
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count,
                                                            nvmlProcessInfo_t *infos) {
    ASK(d, device);
    return running_processes(&d, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                            nvmlProcessInfo_t *infos) {
    ASK(d, device);
    return running_processes(&d, count, infos);
}

/* Nothing draws here: all processes compute. */
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                             nvmlProcessInfo_t *infos) {
    ASK(d, device);
    (void)infos;
    *count = 0;
    return SUCCESS;
}

/* The path of a process of a scenario that has a name there. */
EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length) {
    nvmlReturn_t result = enter(__func__);
    if (result != SUCCESS) return result;
    result = NOT_FOUND;
    for (int i = 0; i < now_played.num_devices; i++)
        for (int j = 0; j < now_played.devices[i].num_processes; j++) {
            const struct process *p = &now_played.devices[i].processes[j];
            if ((unsigned int)p->pid == pid && p->name[0]) result = copy_text(p->name, name, length);
        }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- What a device does ---- */

#define FIGURE(function, type, figure) \
    EXPORT nvmlReturn_t function(nvmlDevice_t device, type *value) { \
        ASK(d, device); \
        *value = (type)(figure); \
        return SUCCESS; \
    }

FIGURE(nvmlDeviceGetPowerUsage, unsigned int, lround(1e3 * shown_at(&d, &d.power_w, d.asked_at_s)))
FIGURE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, d.event_reasons)
FIGURE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, d.event_reasons)
FIGURE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, d.pcie_generation)
FIGURE(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, d.pcie_width)
FIGURE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, d.max_pcie_generation)
FIGURE(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, d.max_pcie_width)

EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy_mj) {
    ASK(d, device);
    if (!d.has_energy) return NOT_SUPPORTED;
    *energy_mj = (unsigned long long)(1e3 * energy_j(&d, d.asked_at_s));
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit_mw) {
    ASK(d, device);
    if (d.power_limit_w == 0) return NOT_SUPPORTED;
    *limit_mw = (unsigned int)lround(1e3 * d.power_limit_w);
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *temp_c) {
    ASK(d, device);
    *temp_c = (unsigned int)d.temp_c;
    return sensor == 0 ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_t *temperature) {
    ASK(d, device);
    if (temperature->version != TEMPERATURE_V1) return VERSION_MISMATCH;
    temperature->temperature = d.temp_c;
    return temperature->sensorType == 0 ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *mhz) {
    ASK(d, device);
    *mhz = (unsigned int)(type == CLOCK_MEM ? d.mem_clock_mhz : d.sm_clock_mhz);
    int rests = d.simulated && busy_pct(&d, d.asked_at_s - 1, d.asked_at_s) == 0;
    if (rests && type != CLOCK_MEM) *mhz /= RESTING_CLOCK;
    return type < 4 ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned int counter, unsigned int *kb_s) {
    ASK(d, device);
    *kb_s = (unsigned int)(counter == PCIE_TX ? d.pcie_tx_kb_s : d.pcie_rx_kb_s);
    pthread_mutex_lock(&lock);
    if (d.simulated) *kb_s = (unsigned int)pcie_kb_s(&d, counter == PCIE_RX); /* what the card receives goes to it */
    pthread_mutex_unlock(&lock);
    return counter <= PCIE_RX ? SUCCESS : INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates) {
    ASK(d, device);
    rates->gpu = (unsigned int)lround(shown_at(&d, &d.util, d.asked_at_s));
    rates->memory = (unsigned int)lround(shown_at(&d, &d.memory_util, d.asked_at_s));
    return SUCCESS;
}

/* ---- GPU performance monitoring ---- */

enum { GPM_TENSOR = 5, GPM_DRAM = 10, GPM_PCIE_TX = 20, GPM_PCIE_RX = 21 };

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) {
    ASK(d, device);
    if (support->version != GPM_VERSION) return VERSION_MISMATCH;
    support->isSupportedDevice = (unsigned int)d.gpm;
    return SUCCESS;
}

static int is_sample(nvmlGpmSample_t sample) {
    return sample >= gpm_samples && sample < gpm_samples + MAX_GPM_SAMPLES && sample->used;
}

EXPORT nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) {
    nvmlReturn_t result = enter(__func__);
    if (result != SUCCESS) return result;
    result = OUT_OF_MEMORY;
    for (size_t i = 0; i < MAX_GPM_SAMPLES && result != SUCCESS; i++) {
        if (gpm_samples[i].used) continue;
        gpm_samples[i] = (struct gpm_sample){ .used = 1 };
        *sample = &gpm_samples[i];
        result = SUCCESS;
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) {
    nvmlReturn_t result = enter(__func__);
    if (result != SUCCESS) return result;
    result = is_sample(sample) ? SUCCESS : INVALID_ARGUMENT; /* also for one that was freed before */
    if (result == SUCCESS) sample->used = 0;
    pthread_mutex_unlock(&lock);
    return result;
}

static nvmlReturn_t take_sample(int device, nvmlGpmSample_t sample) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = is_sample(sample) ? SUCCESS : INVALID_ARGUMENT;
    if (result == SUCCESS) {
        *sample = (struct gpm_sample){ .used = 1, .taken = 1, .device = device, .at_s = elapsed_s() };
        const struct device *d = &now_played.devices[device];
        if (is_simulated(d)) {
            sample->to_card_bytes = fake_cuda_to_card_bytes(machine, d->simulated - 1);
            sample->to_host_bytes = fake_cuda_to_host_bytes(machine, d->simulated - 1);
        }
    }
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) {
    ASK(d, device);
    return d.gpm ? take_sample((int)(device - handles), sample) : NOT_SUPPORTED;
}

/* `device` is the card, not the instance. */
EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned int gpu_instance_id, nvmlGpmSample_t sample) {
    ASK(d, device);
    if (!d.gpm) return NOT_SUPPORTED;
    for (int i = 0; i < now_played.num_devices; i++) {
        const struct device *mig = &now_played.devices[i];
        if (mig->parent == device - handles && mig->gpu_instance_id == (int)gpu_instance_id)
            return take_sample(i, sample);
    }
    return NOT_FOUND;
}

/* The mean of a metric between two samples, before its scale; figures that are no wave are constant. */
static double gpm_mean(const struct device *d, int metric, const struct gpm_sample *one, const struct gpm_sample *two) {
    double took_s = two->at_s - one->at_s, mib = 1 << 20;
    if (metric == GPM_PCIE_TX)
        return d->simulated ? (double)(two->to_host_bytes - one->to_host_bytes) / took_s / mib : d->pcie_tx_kb_s * 1e3 / mib;
    if (metric == GPM_PCIE_RX)
        return d->simulated ? (double)(two->to_card_bytes - one->to_card_bytes) / took_s / mib : d->pcie_rx_kb_s * 1e3 / mib;
    if (is_simulated(d) && fake_cuda_load(&machine->cards[d->simulated - 1].has_parts)) {
        int part = metric == GPM_TENSOR ? FAKE_CUDA_TENSOR_CORES : metric == GPM_DRAM ? FAKE_CUDA_MEMORY
                                                                                      : FAKE_CUDA_MULTIPROCESSORS;
        return used_pct(d, part, one->at_s, two->at_s);
    }
    if (d->simulated) return busy_pct(d, one->at_s, two->at_s);
    return (wave_integral(&d->util, two->at_s) - wave_integral(&d->util, one->at_s)) / took_s;
}

static void answer_metric(const struct device *d, const struct gpm_sample *one, const struct gpm_sample *two,
                          nvmlGpmMetric_t *asked) {
    asked->nvmlReturn = NOT_SUPPORTED;
    asked->value = 0;
    for (int i = 0; i < d->num_metrics; i++) {
        const struct metric *m = &d->metrics[i];
        if (m->id != (int)asked->metricId) continue;
        asked->nvmlReturn = m->code ? (nvmlReturn_t)m->code : two->at_s > one->at_s ? SUCCESS : NO_DATA;
        if (asked->nvmlReturn == SUCCESS) asked->value = m->scale * gpm_mean(d, m->id, one, two);
    }
}

EXPORT nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *asked) {
    nvmlReturn_t result = enter(__func__);
    if (result != SUCCESS) return result;
    const struct gpm_sample *one = asked->sample1, *two = asked->sample2;
    if (asked->version != GPM_VERSION) result = VERSION_MISMATCH;
    else if (!is_sample(asked->sample1) || !is_sample(asked->sample2)) result = INVALID_ARGUMENT;
    else if (!one->taken || !two->taken || one->device != two->device) result = INVALID_ARGUMENT;
    for (unsigned int i = 0; result == SUCCESS && i < asked->numMetrics; i++)
        answer_metric(&now_played.devices[one->device], one, two, &asked->metrics[i]);
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- For tests ---- */

/* Plays another scenario: from the next nvmlInit on, its clock at 0; at once and on the same clock when NVML is open. */
EXPORT nvmlReturn_t fake_nvml_load(const char *path) {
    pthread_mutex_lock(&lock);
    snprintf(loaded_path, sizeof loaded_path, "%s", path);
    nvmlReturn_t result = SUCCESS;
    if (num_users > 0) {
        result = read_scenario(path, &now_played);
    } else {
        started = 0;
        advanced_s = 0;
        num_device_calls = 0;
        memset(calls, 0, sizeof calls);
        memset(hang_is_over, 0, sizeof hang_is_over);
    }
    pthread_mutex_unlock(&lock);
    return result;
}

/* Lets seconds pass. */
EXPORT void fake_nvml_advance(double seconds) {
    pthread_mutex_lock(&lock);
    advanced_s += seconds;
    pthread_mutex_unlock(&lock);
}

/* Seconds on the scenario's clock. */
EXPORT double fake_nvml_elapsed_s(void) {
    pthread_mutex_lock(&lock);
    double t = elapsed_s();
    pthread_mutex_unlock(&lock);
    return t;
}

EXPORT int fake_nvml_num_users(void) {
    pthread_mutex_lock(&lock);
    int num = num_users;
    pthread_mutex_unlock(&lock);
    return num;
}

EXPORT int fake_nvml_num_gpm_samples(void) {
    pthread_mutex_lock(&lock);
    int num = 0;
    for (size_t i = 0; i < MAX_GPM_SAMPLES; i++) num += gpm_samples[i].used;
    pthread_mutex_unlock(&lock);
    return num;
}

EXPORT unsigned long fake_nvml_num_calls(const char *function) {
    pthread_mutex_lock(&lock);
    unsigned long num = 0;
    for (size_t i = 0; i < COUNT(calls); i++)
        if (strcmp(calls[i].function, function) == 0) num = calls[i].count;
    pthread_mutex_unlock(&lock);
    return num;
}

/* As the process ends, for tests of a subprocess: appends `pid name number` lines to the file FAKE_NVML_REPORT. */
__attribute__((destructor)) static void report(void) {
    const char *path = getenv("FAKE_NVML_REPORT");
    FILE *file = path && calls[0].count ? fopen(path, "a") : NULL;
    if (file == NULL) return;
    int pid = (int)getpid();
    for (size_t i = 0; i < COUNT(calls) && calls[i].count; i++)
        fprintf(file, "%d %s %lu\n", pid, calls[i].function, calls[i].count);
    fprintf(file, "%d users %d\n%d gpm_samples %d\n", pid, num_users, pid, fake_nvml_num_gpm_samples());
    fclose(file);
}
