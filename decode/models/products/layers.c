/* Decoder layers for few tokens, in float32, built from few_rows.c and attention.c.

   hidden and result are [batch * count, inputs]. first_qkv may contain the first layer's queries, keys and values. The four
   weights of a layer and the MLP's activation have the format of few_rows. bias_* are the biases of the products. norm_heads
   are the weights of the query and key norms: one norm per head if norms_apart, else one for all query heads and one for all
   key heads. norm_attended and norm_made are applied to the outputs of attention and MLP. All of these may be null, as may
   the weights of the norms before attention and MLP. These norms are absent if offset < 0, and are LayerNorms if centred. If
   parallel, attention and MLP have the same input. turns, mask and rows_of_mask have the format of attend. work has space
   for the queries, keys and values, attention outputs, gates and values of the MLP, and hidden states of all rows. */

#include <stddef.h>

#include "vectors.h"

typedef struct {
    const char *qkv, *out, *up, *down;
    const float *norm_in, *norm_mlp, *bias_qkv, *bias_out, *bias_up, *bias_down, *norm_heads, *norm_attended, *norm_made;
    float *keys, *values;
    const float *turns, *mask;
    long rows_of_mask;
} layer;

void few_rows(
    const char *w, const float *given, const float *add, long add_apart, float *y, long inputs, long outputs, int count,
    int kind, int threads, const float *norm, float offset, int before);
void attend(
    const float *qkv, const float *turns, const float *mask, float *keys, float *values, const long *lengths,
    float *attended, long rows_of_turns, long rows_of_mask, long row_apart, long head_apart, int batch, int count,
    int heads, int groups, int width, int start, int end, int threads, float cap);

/* Apply RMSNorm in place, then add `add` unless it is null. */
static inline void normed(float *x, const float *add, const float *weights, long numbers, float eps)
{
    vector squares = {0};
    for (long e = 0; e < numbers; e += LANES)
        squares += *(vector *)(x + e) * *(vector *)(x + e);
    const float scale = 1.0f / sqrtf(total(squares) / (float)numbers + eps);
    for (long e = 0; e < numbers; e += LANES) {
        vector scaled = *(vector *)(x + e) * scale * *(const vector *)(weights + e);
        *(vector *)(x + e) = add ? scaled + *(const vector *)(add + e) : scaled;
    }
}

static void norm_heads(float *x, const float *weights, long rows, long apart, long numbers, long together, float eps)
{
    for (long row = 0; row < rows; row++)
        for (long from = 0; from < numbers; from += together)
            normed(x + row * apart + from, NULL, weights + from, together, eps);
}

static void add_bias(float *x, const float *bias, long rows, long numbers)
{
    for (long row = 0; row < rows && bias; row++)
        for (long e = 0; e < numbers; e += LANES)
            *(vector *)(x + row * numbers + e) += *(const vector *)(bias + e);
}

void layers(
    const layer *all, const float *hidden, const float *first_qkv, float *work, float *result, const long *lengths,
    long rows_of_turns, long row_apart, long head_apart, long inputs, long mlp, int number, int kind, int batch, int count,
    int heads, int groups, int width, int start, int end, int threads, int norms_apart, int activation, int centred,
    int parallel, float offset, float eps, float cap)
{
    const long read = (long)heads * width, kept = (long)groups * width, asked = read + 2 * kept;
    const long gates_of = GATED(activation) ? 2 * mlp : mlp;
    const int rows = batch * count, norm = centred ? CENTRED : 0;
    float *own_qkv = work, *attended = own_qkv + rows * asked, *gates = attended + rows * read;
    float *between = gates + rows * 2 * mlp;
    for (int number_of = 0; number_of < number; number_of++) {
        const layer *one = all + number_of;
        const float *qkv = number_of == 0 && first_qkv ? first_qkv : own_qkv;
        if (qkv == own_qkv)
            few_rows(
                one->qkv, hidden, one->bias_qkv, 0, own_qkv, inputs, asked, rows, kind, threads, one->norm_in, offset, norm);
        if (one->norm_heads) {
            norm_heads(own_qkv, one->norm_heads, rows, asked, read, norms_apart ? width : read, eps);
            norm_heads(own_qkv + read, one->norm_heads + read, rows, asked, kept, norms_apart ? width : kept, eps);
        }
        attend(
            qkv, one->turns, one->mask, one->keys, one->values, lengths, attended, rows_of_turns, one->rows_of_mask,
            row_apart, head_apart, batch, count, heads, groups, width, start, end, threads, cap);
        const float *add = one->norm_attended ? NULL : hidden;
        few_rows(one->out, attended, add, inputs, between, read, inputs, rows, kind, threads, NULL, -1, 0);
        add_bias(between, one->bias_out, rows, inputs);
        for (long row = 0; row < rows && !add; row++)
            normed(between + row * inputs, hidden + row * inputs, one->norm_attended, inputs, eps);
        few_rows(
            one->up, parallel ? hidden : between, one->bias_up, 0, gates, inputs, gates_of, rows, kind, threads,
            one->norm_mlp, offset, norm);
        add = one->norm_made ? NULL : between;
        few_rows(one->down, gates, add, inputs, result, mlp, inputs, rows, kind, threads, NULL, -1, activation);
        add_bias(result, one->bias_down, rows, inputs);
        for (long row = 0; row < rows && !add; row++)
            normed(result + row * inputs, between + row * inputs, one->norm_made, inputs, eps);
        hidden = result;
    }
}
