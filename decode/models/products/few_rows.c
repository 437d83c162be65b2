/* y = x W^T (+ add) for the few rows x that decoding has: each weight is read once, whatever the rows.

   W lies in panels of 16 outputs, w[output / 16][input][output % 16], of float32 or, if narrow, of bfloat16. x is [count,
   inputs], y and add [count, outputs], float32; outputs are a multiple of 16, count is at most 16, add may be null.

   What stands before a product in a decoder is done here too: a row of x may be divided by its length, with an offset
   beside it, and multiplied by a norm's weights; or, if gated, be SiLU(first half) * second half. Inputs are a multiple of
   16 then. Every thread does so for itself: that costs less than to wait for each other. */

#include "panels.h"

typedef unsigned int words __attribute__((vector_size(64)));
typedef unsigned short halves __attribute__((vector_size(32), aligned(2)));

#define AHEAD 8192 /* bytes: how far ahead of its use a weight is asked for */

static inline __attribute__((always_inline)) panel weights(const char *at, const int narrow)
{
    if (narrow)
        return (panel)(__builtin_convertvector(*(const halves *)at, words) << 16);
    return *(const panel *)at;
}

static inline __attribute__((always_inline)) void some_panels(
    const char *w, const float *x, const float *add, float *y, long inputs, long outputs, long from, long to,
    const int count, const int narrow)
{
    const long bytes = narrow ? 32 : 64;
    const int together = count <= 12 ? 2 : 1; /* more sums than there are registers are slow */
    for (long p = from; p < to; p++) {
        const char *at = w + p * inputs * bytes;
        panel sums[2][count]; /* of even and odd inputs, for one sum waits four cycles for the last */
        for (int row = 0; row < count; row++)
            sums[0][row] = sums[1][row] = (panel){0};
        long i = 0;
        for (; i + together <= inputs; i += together)
            for (int odd = 0; odd < together; odd++) {
                panel weight = weights(at + (i + odd) * bytes, narrow);
                if (!narrow || !odd)
                    __builtin_prefetch(at + (i + odd) * bytes + AHEAD);
                for (int row = 0; row < count; row++)
                    sums[odd][row] += weight * x[row * inputs + i + odd];
            }
        for (; i < inputs; i++) {
            panel weight = weights(at + i * bytes, narrow);
            for (int row = 0; row < count; row++)
                sums[0][row] += weight * x[row * inputs + i];
        }
        for (int row = 0; row < count; row++)
            sums[0][row] += sums[1][row];
        for (int row = 0; row < count; row++) {
            long place = row * outputs + p * 16;
            if (add)
                sums[0][row] += *(const panel *)(add + place);
            *(panel *)(y + place) = sums[0][row];
        }
    }
}

static void gate(const float *x, float *to, long inputs, int count)
{
    for (int row = 0; row < count; row++)
        for (long i = 0; i < inputs; i += 16) {
            const float *at = x + row * 2 * inputs + i;
            panel open = *(const panel *)at, value = *(const panel *)(at + inputs);
            *(panel *)(to + row * inputs + i) = open / (1.0f + exponential(-open)) * value;
        }
}

static void normalise(const float *x, float *to, long inputs, int count, const float *norm, float offset)
{
    for (int row = 0; row < count; row++) {
        const float *at = x + row * inputs;
        panel squares = {0};
        for (long i = 0; i < inputs; i += 16)
            squares += *(const panel *)(at + i) * *(const panel *)(at + i);
        float scale = 1.0f / sqrtf(total(squares) + offset * offset);
        for (long i = 0; i < inputs; i += 16) {
            panel scaled = *(const panel *)(at + i) * scale;
            *(panel *)(to + row * inputs + i) = norm ? scaled * *(const panel *)(norm + i) : scaled;
        }
    }
}

void few_rows(
    const char *w, const float *given, const float *add, float *y, long inputs, long outputs, int count, int narrow,
    int threads, const float *norm, float offset, int gated)
{
    long panels = outputs / 16;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int thread = 0; thread < threads; thread++) {
        float made[gated || offset >= 0 ? count * inputs : 1];
        if (gated)
            gate(given, made, inputs, count);
        else if (offset >= 0)
            normalise(given, made, inputs, count, norm, offset);
        const float *x = gated || offset >= 0 ? made : given;
        long from = panels * thread / threads, to = panels * (thread + 1) / threads;
#define CASE(count) \
    case count: \
        if (narrow) \
            some_panels(w, x, add, y, inputs, outputs, from, to, count, 1); \
        else \
            some_panels(w, x, add, y, inputs, outputs, from, to, count, 0); \
        break;
        switch (count) { /* each with its number of rows known, so that the sums stay in registers */
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8)
            CASE(9) CASE(10) CASE(11) CASE(12) CASE(13) CASE(14) CASE(15) CASE(16)
        }
    }
}
