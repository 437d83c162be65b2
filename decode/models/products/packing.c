/* Conversion of weights between rows and the panels that few_rows reads.

   pack reads rows of float32, or of bfloat16 if narrow, and writes panels of a kind. For int8, elements are rounded to the
   nearest of 255 values, so that the largest magnitude in a row becomes 127. unpack writes rows of the weights in any order,
   in float32 for int8 weights and in the stored type otherwise. */

#include <float.h>
#include <string.h>
#include "vectors.h"

#define SIDE 16 /* outputs of a panel, and units of a block that fits into the L1 cache */

static long panel_bytes(long inputs, int kind)
{
    return SIDE * (kind >= BYTES ? inputs + 4 : inputs * (kind == WIDE ? 4 : 2));
}

static inline __attribute__((always_inline)) float element(const char *row, long i, int narrow)
{
    if (!narrow)
        return ((const float *)row)[i];
    const union { unsigned int bits; float value; } wide = {(unsigned int)((const unsigned short *)row)[i] << 16};
    return wide.value;
}

/* Round a row to integers, and return their scale. */
static inline __attribute__((always_inline)) float quantise(const char *row, unsigned char *to, long inputs, int narrow, int offset)
{
    union { int bits; float value; } largest = {0}, here; /* magnitudes are ordered as their bits, with NaN as the largest */
    for (long i = 0; i < inputs; i++) {
        here.value = element(row, i, narrow);
        here.bits &= 0x7fffffff;
        largest.bits = here.bits > largest.bits ? here.bits : largest.bits;
    }
    const float unit = largest.value / 127.0f < FLT_MIN ? FLT_MIN : largest.value / 127.0f;
    for (long i = 0; i < inputs; i++) {
        float whole = element(row, i, narrow) / unit + 12582912.0f - 12582912.0f; /* rounds to nearest, ties to even */
        whole = whole > 127.0f ? 127.0f : whole < -127.0f ? -127.0f : whole;
        to[i] = (unsigned char)((int)whole + offset);
    }
    return unit;
}

void pack(const char *from, int narrow, char *to, long inputs, long outputs, int kind, int threads)
{
    const long size = panel_bytes(inputs, kind), panels = (outputs + SIDE - 1) / SIDE;
    const long scales = kind >= BYTES ? 4 * SIDE : 0, of_row = inputs * (narrow ? 2 : 4);
    const int unit = kind == NARROW ? 2 : 4;
    const long units = (size - scales) / SIDE / unit;
#pragma omp parallel for num_threads(threads)
    for (long panel = 0; panel < panels; panel++) {
        char *at = to + panel * size;
        const int count = outputs - panel * SIDE < SIDE ? (int)(outputs - panel * SIDE) : SIDE;
        unsigned char made[kind >= BYTES ? SIDE * inputs : 1];
        const char *rows[SIDE];
        if (count < SIDE)
            memset(at, 0, size);
        for (int row = 0; row < count; row++) {
            rows[row] = from + (panel * SIDE + row) * of_row;
            if (kind >= BYTES) {
                unsigned char *whole = made + row * inputs;
                const int offset = kind == FOURS ? 128 : 0;
                ((float *)at)[row] = narrow ? quantise(rows[row], whole, inputs, 1, offset)
                                            : quantise(rows[row], whole, inputs, 0, offset);
                rows[row] = (const char *)whole;
            }
        }
        for (long start = 0; start < units; start += SIDE) {
            const long end = start + SIDE < units ? start + SIDE : units;
            for (int row = 0; row < count; row++)
                for (long i = start; i < end; i++)
                    if (unit == 4)
                        ((unsigned int *)(at + scales))[i * SIDE + row] = ((const unsigned int *)rows[row])[i];
                    else
                        ((unsigned short *)(at + scales))[i * SIDE + row] = ((const unsigned short *)rows[row])[i];
        }
    }
}

void unpack(const char *w, const long *rows, long count, char *to, long inputs, int kind, int threads)
{
    const long size = panel_bytes(inputs, kind), scales = kind >= BYTES ? 4 * SIDE : 0;
    const int unit = kind == NARROW ? 2 : 4;
    const long units = (size - scales) / SIDE / unit, of_row = inputs * (kind == NARROW || kind == PAIRS ? 2 : 4);
#pragma omp parallel for num_threads(threads)
    for (long first = 0; first < count; first += SIDE)
        for (long start = 0; start < units; start += SIDE) {
            const long end = start + SIDE < units ? start + SIDE : units;
            for (long row = first; row < count && row < first + SIDE; row++) {
                const char *panel = w + rows[row] / SIDE * size, *at = panel + scales;
                const int lane = (int)(rows[row] % SIDE), offset = kind == FOURS ? 128 : 0;
                char *out = to + row * of_row;
                for (long i = start; i < end; i++)
                    if (kind >= BYTES) {
                        const unsigned char *four = (const unsigned char *)at + 4 * (i * SIDE + lane);
                        for (int part = 0; part < 4; part++)
                            ((float *)out)[4 * i + part] = (signed char)(four[part] - offset) * ((const float *)panel)[lane];
                    } else if (unit == 4)
                        ((unsigned int *)out)[i] = ((const unsigned int *)at)[i * SIDE + lane];
                    else
                        ((unsigned short *)out)[i] = ((const unsigned short *)at)[i * SIDE + lane];
            }
        }
}
