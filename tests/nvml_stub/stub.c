/* A libnvidia-ml.so.1 that reads its machine from the text file named by NVML_STUB.
 *
 * One setting a line; D is a device number, 0.. for cards and 32.. for MIG instances:
 *
 *   init CODE                 what nvmlInit returns          driver TEXT      the driver's version
 *   cuda N                    the newest CUDA it knows, 12080 for 12.8
 *   count N                   how many cards
 *   D.name TEXT               bytes are passed on as they are
 *   D.uuid TEXT
 *   D.memory TOTAL RESERVED FREE USED     bytes, as v2 reports them; v1 counts RESERVED as used
 *   D.util N   D.temp N   D.power N   D.cap N   D.throttle N   D.state N   D.fan N   D.clock NOW MAX
 *   D.memutil N   D.ecc N   D.pcie GEN MAX WIDTH MAX
 *   D.busy PID PERCENT        a sample of a process; may be repeated
 *   D.compute PID BYTES       a process; may be repeated, -1 bytes stands for "not available"
 *   D.graphics PID BYTES      D.mps PID BYTES     a client of the Multi-Process Service
 *   D.mig                     the card is in MIG mode
 *   D.parent CARD             the instance belongs to that card
 *   fail D SYMBOL CODE        that function returns CODE for that device; D may be *
 *   hang SYMBOL PATH          that function does not return while there is a file of that name
 *
 * With -DOLD_DRIVER the functions that drivers before R510 lack are not there.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEVICES 64
#define FIRST_INSTANCE 32
#define PROCESSES 32
#define FAULTS 64
enum { NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, INVALID_ARGUMENT = 2, UNINITIALIZED = 1 };

typedef struct { uint32_t pid; uint64_t used; uint32_t gi, ci; } process_t;
typedef struct { process_t list[PROCESSES]; uint32_t count; } processes_t;
typedef struct {
    char name[128], uuid[96];
    uint64_t total, reserved, free, used, throttle;
    uint32_t util, temp, power, cap, state, fan, clock, clock_max, mig;
    uint32_t memutil, ecc, pcie[4];
    struct { uint32_t pid, percent; } busy[PROCESSES];
    uint32_t samples;
    int parent;
    processes_t compute, graphics, mps;
} device_t;
typedef struct { int device; char symbol[80]; int code; } fault_t;

static device_t devices[DEVICES];
static fault_t faults[FAULTS];
static char hang[80], hangs_while[256];
static int cuda = 13000;
static int count = 1, init_code, fault_count, calls, loaded, initialised;
static char driver[80] = "570.00";

int nvml_stub_calls(void) { return calls; }

static void add(processes_t *to, const char *rest) {
    long long pid = 0, used = 0;
    if (to->count < PROCESSES && sscanf(rest, "%lld %lld", &pid, &used) == 2) {
        process_t each = {(uint32_t)pid, (uint64_t)used, 0xFFFFFFFFu, 0xFFFFFFFFu};
        to->list[to->count++] = each;
    }
}

static void set_device(device_t *d, const char *key, const char *rest) {
    if (!strcmp(key, "name")) snprintf(d->name, sizeof d->name, "%s", rest);
    else if (!strcmp(key, "uuid")) snprintf(d->uuid, sizeof d->uuid, "%s", rest);
    else if (!strcmp(key, "memory"))
        sscanf(rest, "%lu %lu %lu %lu", &d->total, &d->reserved, &d->free, &d->used);
    else if (!strcmp(key, "util")) d->util = atoi(rest);
    else if (!strcmp(key, "temp")) d->temp = atoi(rest);
    else if (!strcmp(key, "power")) d->power = atoi(rest);
    else if (!strcmp(key, "cap")) d->cap = atoi(rest);
    else if (!strcmp(key, "throttle")) d->throttle = strtoull(rest, NULL, 0);
    else if (!strcmp(key, "state")) d->state = atoi(rest);
    else if (!strcmp(key, "fan")) d->fan = atoi(rest);
    else if (!strcmp(key, "clock")) sscanf(rest, "%u %u", &d->clock, &d->clock_max);
    else if (!strcmp(key, "memutil")) d->memutil = atoi(rest);
    else if (!strcmp(key, "ecc")) d->ecc = atoi(rest);
    else if (!strcmp(key, "pcie")) sscanf(rest, "%u %u %u %u", d->pcie, d->pcie + 1, d->pcie + 2, d->pcie + 3);
    else if (!strcmp(key, "busy") && d->samples < PROCESSES) {
        sscanf(rest, "%u %u", &d->busy[d->samples].pid, &d->busy[d->samples].percent);
        d->samples++;
    }
    else if (!strcmp(key, "compute")) add(&d->compute, rest);
    else if (!strcmp(key, "graphics")) add(&d->graphics, rest);
    else if (!strcmp(key, "mps")) add(&d->mps, rest);
    else if (!strcmp(key, "mig")) d->mig = 1;
    else if (!strcmp(key, "parent")) d->parent = atoi(rest);
}

static void set(char *line) {
    char *rest = strchr(line, ' '), *key;
    if (rest) *rest++ = 0; else rest = line + strlen(line);
    if (!strcmp(line, "init")) init_code = atoi(rest);
    else if (!strcmp(line, "driver")) snprintf(driver, sizeof driver, "%s", rest);
    else if (!strcmp(line, "cuda")) cuda = atoi(rest);
    else if (!strcmp(line, "hang")) sscanf(rest, "%79s %255s", hang, hangs_while);
    else if (!strcmp(line, "count")) count = atoi(rest);
    else if (!strcmp(line, "fail") && fault_count < FAULTS) {
        char device[8];
        fault_t *f = &faults[fault_count++];
        sscanf(rest, "%7s %79s %d", device, f->symbol, &f->code);
        f->device = device[0] == '*' ? -1 : atoi(device);
    } else if ((key = strchr(line, '.')) && atoi(line) >= 0 && atoi(line) < DEVICES)
        set_device(&devices[atoi(line)], key + 1, rest);
}

static void load(void) {
    char line[512];
    FILE *file;
    if (loaded++) return;
    for (int i = 0; i < DEVICES; i++) devices[i].parent = -1;
    if (!getenv("NVML_STUB") || !(file = fopen(getenv("NVML_STUB"), "r"))) return;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        set(line);
    }
    fclose(file);
}

/* Read the machine again, as after a driver's fault; what is initialised stays so. */
void nvml_stub_reload(void) {
    memset(devices, 0, sizeof devices);
    memset(hang, 0, sizeof hang);
    count = 1, init_code = fault_count = loaded = 0;
    load();
}

static int fault(const char *symbol, int device) {
    calls++;
    load();
    while (!strcmp(hang, symbol) && !access(hangs_while, F_OK)) usleep(1000);
    if (!initialised) return UNINITIALIZED;
    for (int i = 0; i < fault_count; i++)
        if (!strcmp(faults[i].symbol, symbol) && (faults[i].device < 0 || faults[i].device == device))
            return faults[i].code;
    return 0;
}

/* Handles are device numbers plus one, so that no handle is NULL. */
static device_t *of(void *handle) { return &devices[(intptr_t)handle - 1]; }
#define ENTER(symbol, number) do { int rc = fault(symbol, number); if (rc) return rc; } while (0)
#define ON(handle) ENTER(__func__, (int)((intptr_t)(handle) - 1))

int nvmlInitWithFlags(unsigned flags) {
    calls++;
    load();
    if (!init_code) initialised++;
    return init_code;
}
int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) {
    calls++;
    if (!initialised) return UNINITIALIZED;
    initialised--;
    return 0;
}
const char *nvmlErrorString(int code) { return "an error of the stub"; }

int nvmlSystemGetDriverVersion(char *out, unsigned size) {
    ENTER(__func__, -2);
    snprintf(out, size, "%s", driver);
    return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int *out) { ENTER(__func__, -2); *out = cuda; return 0; }
int nvmlSystemGetCudaDriverVersion(int *out) { ENTER(__func__, -2); *out = cuda; return 0; }
int nvmlDeviceGetCount_v2(unsigned *out) { ENTER(__func__, -2); *out = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
    ENTER(__func__, (int)index);
    if ((int)index >= count) return INVALID_ARGUMENT;
    *out = (void *)(intptr_t)(index + 1);
    return 0;
}
int nvmlDeviceGetName(void *h, char *out, unsigned size) { ON(h); snprintf(out, size, "%s", of(h)->name); return 0; }
int nvmlDeviceGetUUID(void *h, char *out, unsigned size) { ON(h); snprintf(out, size, "%s", of(h)->uuid); return 0; }

typedef struct { uint64_t total, free, used; } memory_v1_t;
int nvmlDeviceGetMemoryInfo(void *h, memory_v1_t *out) {
    ON(h);
    memory_v1_t memory = {of(h)->total, of(h)->free, of(h)->used + of(h)->reserved};
    *out = memory;
    return 0;
}
typedef struct { uint32_t gpu, memory; } utilization_t;
int nvmlDeviceGetUtilizationRates(void *h, utilization_t *out) {
    ON(h);
    if (of(h)->mig) return NOT_SUPPORTED;
    out->gpu = of(h)->util;
    out->memory = of(h)->memutil;
    return 0;
}
int nvmlDeviceGetTemperature(void *h, unsigned sensor, unsigned *out) { ON(h); *out = of(h)->temp; return 0; }
int nvmlDeviceGetPowerUsage(void *h, unsigned *out) { ON(h); *out = of(h)->power; return 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *h, unsigned *out) { ON(h); *out = of(h)->cap; return 0; }
int nvmlDeviceGetFanSpeed(void *h, unsigned *out) { ON(h); *out = of(h)->fan; return 0; }
int nvmlDeviceGetPowerState(void *h, unsigned *out) { ON(h); *out = of(h)->state; return 0; }
int nvmlDeviceGetClockInfo(void *h, unsigned kind, unsigned *out) { ON(h); *out = of(h)->clock; return 0; }
int nvmlDeviceGetMaxClockInfo(void *h, unsigned kind, unsigned *out) { ON(h); *out = of(h)->clock_max; return 0; }
int nvmlDeviceGetCudaComputeCapability(void *h, int *major, int *minor) { ON(h); *major = 8; *minor = 0; return 0; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *h, uint64_t *out) { ON(h); *out = of(h)->throttle; return 0; }

int nvmlDeviceGetTotalEccErrors(void *h, unsigned type, unsigned counter, uint64_t *out) {
    ON(h);
    *out = type == 1 && counter == 0 ? of(h)->ecc : 0;
    return 0;
}
/* What only the peers of the benchmark ask: without an answer they would spend their time on errors. */
int nvmlDeviceGetIndex(void *h, unsigned *out) { ON(h); *out = (intptr_t)h - 1; return 0; }
int nvmlDeviceIsMigDeviceHandle(void *h, unsigned *out) { ON(h); *out = (intptr_t)h > FIRST_INSTANCE; return 0; }
int nvmlDeviceGetPowerManagementLimit(void *h, unsigned *out) { ON(h); *out = of(h)->cap; return 0; }
int nvmlDeviceGetDisplayActive(void *h, unsigned *out) { ON(h); *out = 0; return 0; }
int nvmlDeviceGetDisplayMode(void *h, unsigned *out) { ON(h); *out = 0; return 0; }
int nvmlDeviceGetPersistenceMode(void *h, unsigned *out) { ON(h); *out = 1; return 0; }
int nvmlDeviceGetComputeMode(void *h, unsigned *out) { ON(h); *out = 0; return 0; }
int nvmlDeviceGetEncoderUtilization(void *h, unsigned *out, unsigned *period) { ON(h); *out = 3; return 0; }
int nvmlDeviceGetDecoderUtilization(void *h, unsigned *out, unsigned *period) { ON(h); *out = 4; return 0; }
int nvmlDeviceGetPcieThroughput(void *h, unsigned way, unsigned *out) { ON(h); *out = 0; return 0; }
int nvmlDeviceGetDriverModel(void *h, unsigned *now, unsigned *pending) { ON(h); return NOT_SUPPORTED; }
int nvmlDeviceGetDriverModel_v2(void *h, unsigned *now, unsigned *pending) { ON(h); return NOT_SUPPORTED; }

int nvmlDeviceGetCurrPcieLinkGeneration(void *h, unsigned *out) { ON(h); *out = of(h)->pcie[0]; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(void *h, unsigned *out) { ON(h); *out = of(h)->pcie[1]; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(void *h, unsigned *out) { ON(h); *out = of(h)->pcie[2]; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(void *h, unsigned *out) { ON(h); *out = of(h)->pcie[3]; return 0; }
typedef struct { uint32_t pid; uint64_t when; uint32_t sm, memory, encoder, decoder; } sample_t;
int nvmlDeviceGetProcessUtilization(void *h, sample_t *out, unsigned *size, uint64_t since) {
    ON(h);
    if (!of(h)->samples) return NOT_FOUND;
    if (!out) { *size = of(h)->samples; return INSUFFICIENT_SIZE; }
    for (unsigned i = 0; i < of(h)->samples; i++) {
        sample_t each = {of(h)->busy[i].pid, since + i + 1, of(h)->busy[i].percent, 0, 0, 0};
        out[i] = each;
    }
    return 0;
}

typedef struct { char legacy[16]; uint32_t domain, bus, device, id, subsystem; char busId[32]; } pci_t;
int nvmlDeviceGetPciInfo_v3(void *h, pci_t *out) {
    ON(h);
    snprintf(out->busId, sizeof out->busId, "00000000:%02X:00.0", (unsigned)(intptr_t)h);
    return 0;
}

static int list(processes_t *from, unsigned *size, process_t *out) {
    unsigned room = *size;
    *size = from->count;
    if (!from->count) return 0;
    if (!out || room < from->count) return INSUFFICIENT_SIZE;
    memcpy(out, from->list, from->count * sizeof *out);
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v2(void *h, unsigned *size, process_t *out) {
    ON(h);
    return list(&of(h)->compute, size, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v2(void *h, unsigned *size, process_t *out) {
    ON(h);
    return list(&of(h)->graphics, size, out);
}

#ifndef OLD_DRIVER
typedef struct { uint32_t version; uint64_t total, reserved, free, used; } memory_v2_t;
int nvmlDeviceGetMemoryInfo_v2(void *h, memory_v2_t *out) {
    ON(h);
    if (out->version != 0x02000028) return 25;
    memory_v2_t memory = {out->version, of(h)->total, of(h)->reserved, of(h)->free, of(h)->used};
    *out = memory;
    return 0;
}
typedef struct { uint32_t version, sensor; int32_t temperature; } temperature_t;
int nvmlDeviceGetTemperatureV(void *h, temperature_t *out) { ON(h); out->temperature = of(h)->temp; return 0; }
int nvmlDeviceGetPerformanceState(void *h, unsigned *out) { ON(h); *out = of(h)->state; return 0; }
int nvmlDeviceGetCurrentClocksEventReasons(void *h, uint64_t *out) { ON(h); *out = of(h)->throttle; return 0; }
int nvmlDeviceGetComputeRunningProcesses_v3(void *h, unsigned *size, process_t *out) {
    ON(h);
    return list(&of(h)->compute, size, out);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *h, unsigned *size, process_t *out) {
    ON(h);
    return list(&of(h)->graphics, size, out);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *h, unsigned *size, process_t *out) {
    ON(h);
    return list(&of(h)->mps, size, out);
}
int nvmlDeviceGetMigMode(void *h, unsigned *now, unsigned *pending) {
    ON(h);
    *now = *pending = of(h)->mig;
    return 0;
}
int nvmlDeviceGetMaxMigDeviceCount(void *h, unsigned *out) { ON(h); *out = 7; return 0; }
int nvmlDeviceGetMigDeviceHandleByIndex(void *h, unsigned index, void **out) {
    ON(h);
    for (int i = FIRST_INSTANCE; i < DEVICES; i++)
        if (devices[i].parent == (intptr_t)h - 1 && !index--) {
            *out = (void *)(intptr_t)(i + 1);
            return 0;
        }
    return NOT_FOUND;
}
#endif
