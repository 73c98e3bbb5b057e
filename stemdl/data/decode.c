/* Samples from files to tensors in one pass: read, turned, and as the network takes them (float32,
   square-rooted, normalised) or as they are stored.

   NumPy would pass over memory once for each of cast, clip, root, difference and product, and Python
   would take its lock for each sample. Here a block is read into memory that stays in the processor's
   cache, and goes to its place in the batch from there. `decoding.py` is the door to this file. */

#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

/* Vector instructions for each kind of processor, chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define EVERY_PROCESSOR __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define EVERY_PROCESSOR
#endif

static inline uint32_t bits_of(float x) { uint32_t b; memcpy(&b, &x, 4); return b; }
static inline float float_of(uint32_t b) { float x; memcpy(&x, &b, 4); return x; }

/* IEEE half precision to single, exactly. A subnormal half is the mantissa on top of 2^-14, less
   2^-14, so that no subnormal single, which is slow and which TensorFlow's threads flush, occurs. */
static inline float from_half(uint16_t h) {
    uint32_t magnitude = (uint32_t)(h & 0x7fff) << 13;
    float normal = float_of(magnitude + (112u << 23));
    float subnormal = float_of(magnitude + (113u << 23)) - 0x1p-14f;
    float found = magnitude < (1u << 23) ? subnormal : normal;
    return float_of(bits_of(found) | (uint32_t)(h & 0x8000) << 16);
}
static inline float from_single(float x) { return x; }
static inline float from_uint16(uint16_t x) { return x; }

/* Bit 31 is set for infinity and NaN: an exponent of ones, one more, flows over. */
static inline uint32_t odd_half(uint16_t h) { return (uint32_t)((h & 0x7c00) + 0x0400) << 16; }
static inline uint32_t odd_single(float x) { return (bits_of(x) & 0x7f800000) + 0x00800000; }
static inline uint32_t odd_uint16(uint16_t x) { (void)x; return 0; }

static inline float amplitude(float x) { return sqrtf(x > 0 ? x : 0); }
static inline float itself(float x) { return x; }

/* A run of n stored numbers to every `stride`th of `out`, with mean and scale at the same places.
   Bit 31 of the result is set if one is not finite. */
typedef uint32_t (*Run)(const void *stored, int64_t n, void *out, int64_t stride,
                        const float *mean, const float *scale);

/* ivdep: `out` may be where `stored` is, number for number, but is never elsewhere in it. */
#define LOOP(i, odd, expression)                                                                   \
    _Pragma("GCC ivdep")                                                                           \
    for (int64_t i = 0; i < n; i++) {                                                              \
        found |= odd(x[i]);                                                                        \
        expression;                                                                                \
    }
#define DECODE(name, type, odd, convert, root)                                                     \
    EVERY_PROCESSOR static uint32_t name(const void *stored, int64_t n, void *out, int64_t stride, \
                                         const float *mean, const float *scale) {                  \
        const type *x = stored;                                                                    \
        float *y = out;                                                                            \
        uint32_t found = 0;                                                                        \
        if (stride == 1) LOOP(i, odd, y[i] = (root(convert(x[i])) - mean[i]) * scale[i])           \
        else LOOP(i, odd, y[i * stride] =                                                          \
                  (root(convert(x[i])) - mean[i * stride]) * scale[i * stride])                    \
        return found;                                                                              \
    }
#define COPY(name, type, odd)                                                                      \
    EVERY_PROCESSOR static uint32_t name(const void *stored, int64_t n, void *out, int64_t stride, \
                                         const float *mean, const float *scale) {                  \
        const type *x = stored;                                                                    \
        type *y = out;                                                                             \
        uint32_t found = 0;                                                                        \
        (void)mean, (void)scale;                                                                   \
        if (stride == 1) LOOP(i, odd, y[i] = x[i])                                                 \
        else LOOP(i, odd, y[i * stride] = x[i])                                                    \
        return found;                                                                              \
    }
#define ALL(stem, type, odd, convert)                                                              \
    DECODE(stem##_root, type, odd, convert, amplitude)                                             \
    DECODE(stem##_plain, type, odd, convert, itself)                                               \
    COPY(stem##_copy, type, odd)

ALL(float16, uint16_t, odd_half, from_half)
ALL(float32, float, odd_single, from_single)
ALL(uint16, uint16_t, odd_uint16, from_uint16)

/* Stored types times ways, in the order of `decoding.py`. */
static const struct { Run run; int64_t stored, out; } WAYS[] = {
    {float16_root, 2, 4}, {float16_plain, 2, 4}, {float16_copy, 2, 2},
    {float32_root, 4, 4}, {float32_plain, 4, 4}, {float32_copy, 4, 4},
    {uint16_root, 2, 4},  {uint16_plain, 2, 4},  {uint16_copy, 2, 2},
};

enum { FINE, NOT_FINITE, TOO_SHORT, UNREADABLE };

typedef struct {
    int64_t file;     /* descriptor; -1: in memory */
    int64_t place;    /* byte in the file, or address */
    int64_t start;    /* where the first number goes, and how far the next one along each */
    int64_t step[4];  /* axis (Sy, Sx, Ky, Kx) goes from it; counted in numbers */
} Sample;

typedef struct {
    int64_t way;
    int64_t shape[4];  /* Sy, Sx, Ky, Kx as stored */
    int64_t block;     /* patterns that fit into the scratch memory */
    const float *mean, *scale; /* (Ky, Kx) as they go out */
} Layout;

/* `size` bytes from byte `place` on; `*at` is what is wrong: the byte it ends at, or errno. */
static int read_all(int file, int64_t place, char *to, int64_t size, int64_t *at) {
    while (size > 0) {
        ssize_t got = pread(file, to, size, place);
        if (got < 0 && errno == EINTR) continue;
        *at = got < 0 ? errno : place;
        if (got <= 0) return got < 0 ? UNREADABLE : TOO_SHORT;
        to += got, place += got, size -= got;
    }
    return FINE;
}

static int one_sample(const Layout *layout, const Sample *sample, char *out, char *scratch,
                      int64_t *at) {
    const int64_t *shape = layout->shape, *step = sample->step;
    const int64_t patterns = shape[0] * shape[1], pixels = shape[2] * shape[3];
    const int64_t stored_size = WAYS[layout->way].stored, out_size = WAYS[layout->way].out;
    const Run run = WAYS[layout->way].run;
    /* The detector as it is stored is one run, else each of its rows is. */
    const int whole = step[3] == 1 && step[2] == shape[3];
    const int64_t rows = whole ? 1 : shape[2], length = pixels / rows;
    const int64_t pixel = sample->start % pixels;
    /* What neither moves nor grows is read to where it goes. */
    const int in_place = whole && step[1] == pixels && step[0] == shape[1] * pixels &&
                         stored_size == out_size;
    uint32_t found = 0;
    for (int64_t first = 0; first < patterns; first += layout->block) {
        int64_t count = patterns - first < layout->block ? patterns - first : layout->block;
        int64_t skip = first * pixels * stored_size, size = count * pixels * stored_size;
        const char *stored = (const char *)(intptr_t)sample->place + skip;
        if (sample->file >= 0) {
            char *to = in_place ? out + skip : scratch;
            int fault = read_all(sample->file, sample->place + skip, to, size, at);
            if (fault) return fault;
            stored = to;
        }
        for (int64_t pattern = first; pattern < first + count; pattern++) {
            int64_t probe = sample->start - pixel + pattern / shape[1] * step[0] +
                            pattern % shape[1] * step[1];
            for (int64_t row = 0; row < rows; row++) {
                int64_t place = pixel + row * step[2];
                found |= run(stored, length, out + (probe + place) * out_size, step[3],
                             layout->mean + place, layout->scale + place);
                stored += length * stored_size;
            }
        }
    }
    return found >> 31 ? NOT_FINITE : FINE;
}

/* Samples to `out`, one after another. What is wrong, with the number of the sample and a detail. */
int decode(const Layout *layout, const Sample *samples, int64_t count, char *out, char *scratch,
           int64_t *number, int64_t *detail) {
    const int64_t *shape = layout->shape;
    int64_t size = shape[0] * shape[1] * shape[2] * shape[3] * WAYS[layout->way].out;
    for (*number = 0; *number < count; ++*number) {
        int fault = one_sample(layout, &samples[*number], out + *number * size, scratch, detail);
        if (fault) return fault;
    }
    return FINE;
}
