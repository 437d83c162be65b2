/* Skinny GEMM y = x W^T (+ add), where x has few rows, as in decoding. Each weight is read from memory once for all rows.

   W is stored in panels of 16 outputs, w[output / 16][input][output % 16], in float32 or bfloat16. If multiplies_pairs(),
   bfloat16 weights may be stored as w[output / 16][input / 2][output % 16][input % 2], if inputs is a multiple of 16. Then x
   is rounded to bfloat16, and sums are float32. int8 weights are stored as w[output / 16][input / 4][output % 16][input % 4],
   and inputs must be a multiple of 4. Each panel begins with the 16 float32 scales of its outputs. If multiplies_fours()
   and inputs is a multiple of 16, 128 may be added to the weights. Then each row of x is rounded to 16-bit integers, and sums
   are exact. x is [count, inputs] and y is [count, outputs], both in float32. outputs is a multiple of 16. add may be null. The
   distance between its rows is add_apart, which may be 0.

   Rows are processed in groups. Their sums for two vectors of outputs (two panels, if the outputs of a panel fit into a
   register) stay in registers, and later groups read the weights from the CPU cache. The rows of a group are stored as
   [input][row], so that one pointer suffices. AVX-512 registers contain the outputs of a panel. With narrower registers,
   inputs are processed in blocks, whose weights stay in the L1 cache.

   The operation before a product is fused: an RMSNorm with an offset and weights, or a LayerNorm if CENTRED; or an
   activation, with or without a gate in the first half of the input. In these cases, inputs must be a multiple of 16. Every
   thread repeats the operation, which is cheaper than synchronising. */

#include "vectors.h"

#if defined(__AVX512BF16__) || defined(__AVX512VNNI__)
#include <immintrin.h>
#endif

typedef unsigned int words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef unsigned short halves __attribute__((vector_size(2 * LANES), aligned(2)));

#define AHEAD 8192 /* prefetch distance in bytes */
#define BLOCK 128  /* inputs per block, a multiple of 4 */
#if defined(__AVX512F__) || defined(__aarch64__)
#define MOST 12 /* maximum rows of a group, whose sums for two vectors take 24 of 32 registers */
#else
#define MOST 6 /* 12 of 16 registers */
#endif

int multiplies_pairs(void)
{
#ifdef __AVX512BF16__
    return 1;
#else
    return 0;
#endif
}

int multiplies_fours(void)
{
#ifdef __AVX512VNNI__
    return 1;
#else
    return 0;
#endif
}

/* Scale of a row that is rounded to integers, and the initial sums of the row's upper and lower bytes. */
typedef struct { float unit; int begin[2]; } row_of_integers;

static inline __attribute__((always_inline)) vector weights(const char *at, const int part, const int kind)
{
    if (kind == NARROW)
        return (vector)(__builtin_convertvector(*(const halves *)at, words) << 16);
    if (kind == BYTES) /* weights times 2^24, which saves a shift, since x is multiplied by 2^-24 */
        return __builtin_convertvector((integers)(*(const words *)at << (24 - 8 * part) & 0xff000000), vector);
    return *(const vector *)at;
}

static inline __attribute__((always_inline)) vector plus(vector sum, vector weight, float x, const int kind)
{
#ifdef __AVX512BF16__
    if (kind == PAIRS)
        return (vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)weight, (__m512bh)_mm512_set1_ps(x));
#endif
    return sum + weight * x;
}

#if LANES == 16
/* Compute two vectors of outputs for a group of rows. Arrays of constant size and unrolled loops are needed to keep the sums
   in registers. */
static inline __attribute__((always_inline)) void two_vectors(
    const char *left, const char *right, const float *scale[2], const float *x, const float *add[2], long add_apart,
    float *y[2], long steps, long outputs, const int count, const int kind, const char *ahead, long lines)
{
    const long step = kind == NARROW ? 32 : 64;
    const int parts = kind == BYTES ? 4 : 1;
    vector sums[2][MOST];
#pragma GCC unroll 16
    for (int row = 0; row < count; row++)
        sums[0][row] = sums[1][row] = (vector){0};
    for (long i = 0; i < steps; i++) {
        if (!ahead) {
            __builtin_prefetch(left + i * step + AHEAD);
            __builtin_prefetch(right + i * step + AHEAD);
        } else if (i < lines)
            __builtin_prefetch(ahead + i * 64, 0, 2);
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            vector weight = weights(left + i * step, part, kind), other = weights(right + i * step, part, kind);
#pragma GCC unroll 16
            for (int row = 0; row < count; row++) {
                sums[0][row] = plus(sums[0][row], weight, x[(i * parts + part) * count + row], kind);
                sums[1][row] = plus(sums[1][row], other, x[(i * parts + part) * count + row], kind);
            }
        }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++)
#pragma GCC unroll 16
        for (int row = 0; row < count; row++) {
            if (kind == BYTES)
                sums[side][row] *= *(const vector *)scale[side];
            if (add[side])
                sums[side][row] += *(const vector *)(add[side] + row * add_apart);
            *(vector *)(y[side] + row * outputs) = sums[side][row];
        }
}
#else
/* Add the products of a block of inputs to the sums of two vectors of outputs for a group of rows. If NARROW, the vectors
   contain every second output, since shifts and masks are faster than conversions. Cache lines are prefetched from `ahead`
   on, at a distance of `apart` bytes. */
static inline __attribute__((always_inline)) void add_products(
    const char *w, const float *x, vector *to, long inputs, const int count, const int kind, const char *ahead, long apart)
{
    const int parts = kind == BYTES ? 4 : kind == NARROW ? 2 : 1; /* inputs per 64 bytes of weights */
    vector sums[2][MOST];
#pragma GCC unroll 16
    for (int row = 0; row < count; row++)
        sums[0][row] = to[2 * row], sums[1][row] = to[2 * row + 1];
    for (; inputs > 0; inputs -= parts, w += 64, x += parts * count, ahead += apart) {
        __builtin_prefetch(ahead);
#pragma GCC unroll 4
        for (int part = 0; part < parts; part++) {
            if (kind == NARROW && part == 1 && inputs == 1)
                break;
            const words pairs = *(const words *)(w + 32 * part);
            const vector left = kind == NARROW ? (vector)(pairs << 16) : weights(w, part, kind);
            const vector right = kind == NARROW ? (vector)(pairs & 0xffff0000) : weights(w + 4 * LANES, part, kind);
#pragma GCC unroll 16
            for (int row = 0; row < count; row++) {
                sums[0][row] += left * x[part * count + row];
                sums[1][row] += right * x[part * count + row];
            }
        }
    }
#pragma GCC unroll 16
    for (int row = 0; row < count; row++)
        to[2 * row] = sums[0][row], to[2 * row + 1] = sums[1][row];
}

static inline __attribute__((always_inline)) void add_group(
    const char *w, const float *x, vector *to, long inputs, int count, const int kind, const char *ahead, long apart)
{
#define ADD(rows) \
    case rows: \
        if (rows <= MOST) \
            add_products(w, x, to, inputs, rows, kind, ahead, apart); \
        break;
    switch (count) { /* constants, so that loops can be unrolled */
        ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7) ADD(8) ADD(9) ADD(10) ADD(11) ADD(12)
    }
}

/* Compute two vectors of outputs for all rows. x contains groups of `size` rows. Each group prefetches an equal number of
   cache lines. */
static inline __attribute__((always_inline)) void two_vectors(
    const char *w, const float *scale, const float *x, const float *add, long add_apart, float *y, long inputs,
    long outputs, int count, int size, const int kind)
{
    const long parts = kind == BYTES ? 4 : kind == NARROW ? 2 : 1, groups = (count + size - 1) / size;
    const long apart = (64 + groups - 1) / groups;
    vector sums[2 * count];
    for (int i = 0; i < 2 * count; i++)
        sums[i] = (vector){0};
    for (long done = 0; done < inputs; done += BLOCK) {
        const char *block = w + done * 64 / parts;
        const long some = inputs - done < BLOCK ? inputs - done : BLOCK;
        float wide[kind == BYTES ? BLOCK * 16 : 1]; /* converted once for several groups */
        for (long i = 0; kind == BYTES && groups > 1 && i < some; i += 4)
#pragma GCC unroll 4
            for (int part = 0; part < 4; part++) {
                *(vector *)(wide + (i + part) * 16) = weights(block + i * 16, part, BYTES);
                *(vector *)(wide + (i + part) * 16 + LANES) = weights(block + i * 16 + 4 * LANES, part, BYTES);
            }
        for (int start = 0; start < count; start += size) {
            const int rows = count - start < size ? count - start : size;
            const float *from = x + start * inputs + done * rows;
            const char *ahead = block + AHEAD + start / size * some * apart / parts;
            if (kind == BYTES && groups > 1)
                add_group((char *)wide, from, sums + 2 * start, some, rows, WIDE, ahead, apart / 4);
            else
                add_group(block, from, sums + 2 * start, some, rows, kind, ahead, apart);
        }
    }
    for (int row = 0; row < count; row++)
        for (int i = 0; i < 2 * LANES; i++) {
            float sum = kind == NARROW ? sums[2 * row + i % 2][i / 2] : sums[2 * row + i / LANES][i % LANES];
            if (kind == BYTES)
                sum *= scale[i];
            y[row * outputs + i] = add ? sum + add[row * add_apart + i] : sum;
        }
}
#endif

/* Compute two vectors of outputs for a group of rows of integers. One instruction adds the products of four weights of an
   output and four elements of x. */
static inline __attribute__((always_inline)) void two_vectors_of_fours(
    const char *left, const char *right, const float *scale[2], const float *x, const row_of_integers *about,
    const float *add[2], long add_apart, float *y[2], long steps, long outputs, const int count, const char *ahead,
    long lines)
{
#ifdef __AVX512VNNI__
    __m512i sums[2][2][MOST / 4]; /* groups of 4 to 6 rows were slower: registers are spilled */
#pragma GCC unroll 8
    for (int row = 0; row < count; row++)
        for (int half = 0; half < 2; half++)
            sums[0][half][row] = sums[1][half][row] = _mm512_set1_epi32(about[row].begin[half]);
    for (long i = 0; i < steps; i++) {
        __m512i weight = _mm512_loadu_si512(left + i * 64), other = _mm512_loadu_si512(right + i * 64);
        if (!ahead) {
            __builtin_prefetch(left + i * 64 + AHEAD);
            __builtin_prefetch(right + i * 64 + AHEAD);
        } else if (i < lines)
            __builtin_prefetch(ahead + i * 64, 0, 2);
#pragma GCC unroll 8
        for (int row = 0; row < count; row++)
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m512i four = _mm512_castps_si512(_mm512_set1_ps(x[(2 * i + half) * count + row]));
                sums[0][half][row] = _mm512_dpbusd_epi32(sums[0][half][row], weight, four);
                sums[1][half][row] = _mm512_dpbusd_epi32(sums[1][half][row], other, four);
            }
    }
#pragma GCC unroll 2
    for (int side = 0; side < 2; side++)
#pragma GCC unroll 8
        for (int row = 0; row < count; row++) {
            vector upper = (vector)_mm512_cvtepi32_ps(sums[side][0][row]);
            vector sum = upper * 256.0f + (vector)_mm512_cvtepi32_ps(sums[side][1][row]);
            sum *= *(const vector *)scale[side] * about[row].unit;
            if (add[side])
                sum += *(const vector *)(add[side] + row * add_apart);
            *(vector *)(y[side] + row * outputs) = sum;
        }
#endif
}

/* Round a row to 16-bit integers, with separate upper and lower bytes. The unit is not finite if an element is not finite. */
static row_of_integers halve(const float *x, float *to, long inputs, int step)
{
    row_of_integers about = {0};
#ifdef __AVX512VNNI__
    vector most = {0}, none = {0};
    for (long i = 0; i < inputs; i += LANES) {
        vector here = *(const vector *)(x + i);
        most = larger(larger(most, here), -here);
        none += here * 0.0f;
    }
    float largest = 0;
    for (int lane = 0; lane < LANES; lane++)
        largest = most[lane] > largest ? most[lane] : largest;
    const float each = largest > 0 ? 32639.0f / largest : 0; /* 127 * 256 + 127 */
    __m512i sums[2] = {_mm512_setzero_si512(), _mm512_setzero_si512()};
    for (long i = 0; i < inputs; i += LANES) {
        __m512i whole = _mm512_cvtps_epi32((__m512)(*(const vector *)(x + i) * each)), halves_of[2];
        __m512i middle = _mm512_set1_epi32(128);
        halves_of[1] = _mm512_and_si512(_mm512_add_epi32(whole, middle), _mm512_set1_epi32(255));
        halves_of[1] = _mm512_sub_epi32(halves_of[1], middle);
        halves_of[0] = _mm512_srai_epi32(_mm512_sub_epi32(whole, halves_of[1]), 8);
        for (int half = 0; half < 2; half++) {
            union { __m128i bytes; float fours[4]; } laid = {_mm512_cvtepi32_epi8(halves_of[half])};
            for (int four = 0; four < 4; four++)
                to[(i / 2 + 2 * four + half) * step] = laid.fours[four];
            sums[half] = _mm512_add_epi32(sums[half], halves_of[half]);
        }
    }
    about.unit = largest / 32639.0f + total(none);
    for (int half = 0; half < 2; half++)
        about.begin[half] = -128 * _mm512_reduce_add_epi32(sums[half]);
#endif
    return about;
}

/* Store a vector of elements of a row from element i on, with a stride of `step`. */
static inline __attribute__((always_inline)) void put(vector x, float *to, long i, int step, int kind)
{
#ifdef __AVX512BF16__
    if (kind == PAIRS) {
        union { __m256bh halves; float pairs[8]; } rounded = {_mm512_cvtneps_pbh((__m512)x)};
        for (int pair = 0; pair < 8; pair++)
            to[(i / 2 + pair) * step] = rounded.pairs[pair];
        return;
    }
#endif
    for (int lane = 0; lane < LANES; lane++)
        to[(i + lane) * step] = kind == BYTES ? x[lane] * 0x1p-24f : x[lane];
}

static void lay(const float *x, float *to, long inputs, int step, int kind)
{
    long i = 0;
    for (; i + LANES <= inputs; i += LANES)
        put(*(const vector *)(x + i), to, i, step, kind);
    for (; i < inputs; i++)
        to[i * step] = kind == BYTES ? x[i] * 0x1p-24f : x[i];
}

/* Compute the standard normal cumulative distribution function to 1e-7 (Abramowitz and Stegun, 7.1.26). */
static inline vector below(vector x)
{
    const vector size = larger(x, -x) * 0.707106781f, t = 1.0f / (1.0f + 0.3275911f * size);
    vector sum = t * 1.061405429f - 1.453152027f;
    sum = ((sum * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
    const vector beyond = 0.5f * sum * t * exponential(-size * size);
    const integers above = x > 0.0f;
    return (vector)(((integers)(1.0f - beyond) & above) | ((integers)beyond & ~above));
}

static void activate(const float *x, float *to, long inputs, int step, int kind, int by)
{
    for (long i = 0; i < inputs; i += LANES) {
        const vector open = *(const vector *)(x + i);
        vector share; /* factor of the input */
        if (by == RELU)
            share = (vector)((integers)((vector){0} + 1.0f) & (open > 0.0f));
        else if (by == ALONE_GELU)
            share = below(open);
        else { /* the tanh approximation of GELU is x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3))) */
            const vector slope = by == SILU ? open : open * (1.59576912f + 0.0713548163f * open * open);
            share = 1.0f / (1.0f + exponential(-slope));
        }
        put(GATED(by) ? *(const vector *)(x + inputs + i) * (open * share) : open * share, to, i, step, kind);
    }
}

static void normalise(
    const float *x, float *to, long inputs, int step, int kind, const float *norm, float offset, int centred)
{
    vector squares = {0}, sums = {0};
    for (long i = 0; i < inputs && centred; i += LANES)
        sums += *(const vector *)(x + i);
    const float mean = total(sums) / (float)inputs;
    for (long i = 0; i < inputs; i += LANES) {
        const vector apart = *(const vector *)(x + i) - mean;
        squares += apart * apart;
    }
    float scale = 1.0f / sqrtf(total(squares) + offset * offset);
    for (long i = 0; i < inputs; i += LANES) {
        vector scaled = (*(const vector *)(x + i) - mean) * scale;
        if (norm)
            scaled *= *(const vector *)(norm + i);
        put(scaled, to, i, step, kind);
    }
}

void few_rows(
    const char *w, const float *given, const float *add, long add_apart, float *y, long inputs, long outputs, int count,
    int kind, int threads, const float *norm, float offset, int before)
{
    const int activated = before && before != CENTRED;
    const long vectors = outputs / LANES, pairs = (vectors + 1) / 2, halved = kind == PAIRS || kind == FOURS;
    const long numbers = halved ? inputs / 2 : inputs, steps = kind >= BYTES ? inputs / 4 : numbers;
    const long size_of = kind == NARROW ? 2 : 4, scales = kind >= BYTES ? 64 : 0;
    const long apart = scales + steps * 16 * size_of, both = apart * LANES / 8;
    const int most = kind == FOURS ? MOST / 4 : MOST, groups = (count + most - 1) / most;
    const int size = (count + groups - 1) / groups;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        const int as_it_is = count == 1 && kind <= NARROW && !activated && offset < 0, in_integers = kind == FOURS;
        float made[as_it_is ? 1 : count * numbers], whole[in_integers ? inputs : 1];
        row_of_integers about[in_integers ? count : 1];
        for (int row = 0; row < count && !as_it_is; row++) {
            const int start = row / size * size, step = count - start < size ? count - start : size;
            const float *from = given + row * inputs * (GATED(before) ? 2 : 1);
            float *laid = made + start * numbers + (row - start), *to = in_integers ? whole : laid;
            const int to_step = in_integers ? 1 : step, changed = activated || offset >= 0;
            if (activated)
                activate(from, to, inputs, to_step, kind, before);
            else if (changed)
                normalise(from, to, inputs, to_step, kind, norm, offset, before == CENTRED);
            else if (!in_integers)
                lay(from, to, inputs, step, kind);
            if (in_integers)
                about[row] = halve(changed ? whole : from, laid, inputs, step);
        }
        const float *x = as_it_is ? given : made;
        for (long pair = pairs * thread / threads; pair < pairs * (thread + 1) / threads; pair++) {
#if LANES < 16
            const char *panel = w + pair * LANES / 8 * apart;
            const long within = pair * 2 * LANES % 16, from = pair * 2 * LANES;
            const char *at = panel + scales + within * size_of;
            const float *scale = (const float *)panel + within, *added = add ? add + from : 0;
            if (kind == WIDE)
                two_vectors(at, scale, x, added, add_apart, y + from, inputs, outputs, count, size, WIDE);
            else if (kind == NARROW)
                two_vectors(at, scale, x, added, add_apart, y + from, inputs, outputs, count, size, NARROW);
            else
                two_vectors(at, scale, x, added, add_apart, y + from, inputs, outputs, count, size, BYTES);
#else
            const long p = 2 * pair, q = p + 1 < vectors ? p + 1 : p; /* an unpaired last vector is computed twice */
            const char *panels[2] = {w + p * LANES / 16 * apart, w + q * LANES / 16 * apart};
            const long within_p = p * LANES % 16, within_q = q * LANES % 16;
            const char *left = panels[0] + scales + within_p * size_of, *right = panels[1] + scales + within_q * size_of;
            const float *scale[2] = {(const float *)panels[0] + within_p, (const float *)panels[1] + within_q};
            for (int start = 0; start < count; start += size) {
                const long at = start * outputs, lines = both / 64 / groups;
                const char *ahead = groups > 1 ? w + (pair + 1) * both + start / size * lines * 64 : 0;
                const float *added = add ? add + start * add_apart : 0;
                const float *adds[2] = {add ? added + p * LANES : 0, add ? added + q * LANES : 0};
                float *ys[2] = {y + at + p * LANES, y + at + q * LANES};
                const float *from = x + start * numbers;
#define CASE(rows) \
    case rows: \
        if (rows > MOST) \
            break; \
        if (kind == FOURS && rows <= MOST / 4) \
            two_vectors_of_fours( \
                left, right, scale, from, about + start, adds, add_apart, ys, steps, outputs, rows, ahead, lines); \
        else if (kind == WIDE) \
            two_vectors(left, right, scale, from, adds, add_apart, ys, steps, outputs, rows, WIDE, ahead, lines); \
        else if (kind == NARROW) \
            two_vectors(left, right, scale, from, adds, add_apart, ys, steps, outputs, rows, NARROW, ahead, lines); \
        else if (kind == BYTES) \
            two_vectors(left, right, scale, from, adds, add_apart, ys, steps, outputs, rows, BYTES, ahead, lines); \
        else if (kind == PAIRS) \
            two_vectors(left, right, scale, from, adds, add_apart, ys, steps, outputs, rows, PAIRS, ahead, lines); \
        break;
                switch (count - start < size ? count - start : size) { /* constants, so that loops can be unrolled */
                    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
                }
            }
#endif
        }
    }
}
