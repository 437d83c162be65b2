/* Sixteen numbers of float32 side by side, and what is computed of them. */

#include <math.h>

typedef float panel __attribute__((vector_size(64), aligned(4)));
typedef int integers __attribute__((vector_size(64), aligned(4)));

static inline panel within(panel x, float most)
{
    integers above = x > most, below = x < -most;
    panel edge = (panel){0} + most;
    return (panel)(((integers)x & ~(above | below)) | ((integers)edge & above) | ((integers)-edge & below));
}

/* e^x within two units of the last place, by Cody and Waite's reduction; beyond 87 either way that of 87 */
static inline panel exponential(panel x)
{
    x = within(x, 87.0f);
    panel powers = x * 1.44269504f + 12582912.0f - 12582912.0f; /* rounded to integers */
    panel rest = x - powers * 0.693359375f + powers * 2.12194440e-4f;
    panel sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    return sum * (panel)((__builtin_convertvector(powers, integers) + 127) << 23);
}

static inline float total(panel x)
{
    float sum = 0;
    for (int lane = 0; lane < 16; lane++)
        sum += x[lane];
    return sum;
}
