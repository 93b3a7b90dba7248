// Fake of the CUDA runtime's functions that the transfer engine uses: memcpy on one thread per
// stream. A test can hold copies, make functions fail and inspect what was executed.
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { kMemory = 2, kSticky = 700, kLog = 1 << 16 };

struct job {
  struct job *next;
  struct event *event;  // null: the job is a copy
  char *dst;
  const char *src;
  size_t dst_pitch, src_pitch, width, height;
};

struct event {
  int done, error;
};

struct stream {
  pthread_t thread;
  int priority, ending;
  struct job *first, **last;
  struct stream *next;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int held, copy_error, copies_until_error, event_error, record_error;
static int outstanding, most_outstanding, streams, events;
static struct stream *all_streams;
static void *executed[kLog];
static int executed_count;

__attribute__((visibility("default"))) int fake_devices = 1;

// Holds dispatched copies back while `on`.
void fake_hold(int on) {
  pthread_mutex_lock(&mutex);
  held = on;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}
// Makes the dispatch of a copy fail with `error`, after `copies` more copies.
void fake_fail_copy(int copies, int error) {
  pthread_mutex_lock(&mutex);
  copies_until_error = copies;
  copy_error = error;
  pthread_mutex_unlock(&mutex);
}
// Makes the next wait for an event fail.
void fake_fail_event(int error) {
  pthread_mutex_lock(&mutex);
  event_error = error;
  pthread_mutex_unlock(&mutex);
}
// Makes the next recording of an event fail.
void fake_fail_record(int error) {
  pthread_mutex_lock(&mutex);
  record_error = error;
  pthread_mutex_unlock(&mutex);
}
static int read_locked(const int *value) {
  pthread_mutex_lock(&mutex);
  const int result = *value;
  pthread_mutex_unlock(&mutex);
  return result;
}
int fake_outstanding(void) { return read_locked(&outstanding); }
int fake_most_outstanding(void) { return read_locked(&most_outstanding); }
int fake_streams(void) { return read_locked(&streams); }
int fake_events(void) { return read_locked(&events); }
int fake_executed_count(void) { return read_locked(&executed_count); }
// Returns the destination of the copy that was executed as number `index`, from 0.
void *fake_executed(int index) { return executed[index]; }

// Returns whether a stream of a higher priority has a copy waiting; as on a device, it goes first.
static int outranked(const struct stream *stream) {
  for (const struct stream *other = all_streams; other; other = other->next) {
    if (other->priority < stream->priority && other->first && !other->first->event) return 1;
  }
  return 0;
}

static void *run(void *argument) {
  struct stream *stream = argument;
  pthread_mutex_lock(&mutex);
  for (;;) {
    while (!stream->first && !stream->ending) pthread_cond_wait(&changed, &mutex);
    struct job *job = stream->first;
    if (!job) break;
    while (!job->event && (held || outranked(stream))) pthread_cond_wait(&changed, &mutex);
    stream->first = job->next;
    if (!stream->first) stream->last = &stream->first;
    if (job->event) {
      job->event->done = 1;
    } else {
      if (executed_count < kLog) executed[executed_count++] = job->dst;
      pthread_mutex_unlock(&mutex);
      for (size_t row = 0; row < job->height; ++row) {
        memcpy(job->dst + row * job->dst_pitch, job->src + row * job->src_pitch, job->width);
      }
      pthread_mutex_lock(&mutex);
      --outstanding;
    }
    free(job);
    pthread_cond_broadcast(&changed);
  }
  pthread_mutex_unlock(&mutex);
  return NULL;
}

static int push(struct stream *stream, struct job copy) {
  struct job *job = malloc(sizeof *job);
  *job = copy;
  pthread_mutex_lock(&mutex);
  *stream->last = job;
  stream->last = &job->next;
  if (!job->event && ++outstanding > most_outstanding) most_outstanding = outstanding;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
  return 0;
}

static int failing_copy(void) {
  pthread_mutex_lock(&mutex);
  int error = 0;
  if (copy_error && copies_until_error-- == 0) {
    error = copy_error;
    copy_error = 0;
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

int cudaGetDeviceCount(int *count) {
  *count = fake_devices;
  return fake_devices ? 0 : 100;
}
int cudaSetDevice(int device) { return device < fake_devices ? 0 : 101; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  *least = 0;
  *greatest = -1;
  return 0;
}
int cudaStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
  (void)flags;
  struct stream *stream = calloc(1, sizeof *stream);
  stream->priority = priority;
  stream->last = &stream->first;
  pthread_mutex_lock(&mutex);
  ++streams;
  stream->next = all_streams;
  all_streams = stream;
  pthread_mutex_unlock(&mutex);
  *out = stream;
  return pthread_create(&stream->thread, NULL, run, stream) ? kMemory : 0;
}
int cudaStreamSynchronize(struct stream *stream) {
  pthread_mutex_lock(&mutex);
  while (stream->first || outstanding) pthread_cond_wait(&changed, &mutex);
  pthread_mutex_unlock(&mutex);
  return 0;
}
int cudaStreamDestroy(struct stream *stream) {
  pthread_mutex_lock(&mutex);
  stream->ending = 1;
  --streams;
  struct stream **place = &all_streams;
  while (*place != stream) place = &(*place)->next;
  *place = stream->next;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
  pthread_join(stream->thread, NULL);
  free(stream);
  return 0;
}
int cudaMemcpyAsync(void *dst, const void *src, size_t bytes, int kind, struct stream *stream) {
  (void)kind;
  const int error = failing_copy();
  return error ? error : push(stream, (struct job){0, 0, dst, src, bytes, bytes, bytes, 1});
}
int cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                      size_t height, int kind, struct stream *stream) {
  (void)kind;
  const int error = failing_copy();
  return error ? error
               : push(stream, (struct job){0, 0, dst, src, dst_pitch, src_pitch, width, height});
}
int cudaEventCreateWithFlags(struct event **event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof **event);
  pthread_mutex_lock(&mutex);
  ++events;
  pthread_mutex_unlock(&mutex);
  return 0;
}
int cudaEventRecord(struct event *event, struct stream *stream) {
  pthread_mutex_lock(&mutex);
  const int error = record_error;
  record_error = 0;
  pthread_mutex_unlock(&mutex);
  return error ? error : push(stream, (struct job){.event = event});
}
int cudaEventSynchronize(struct event *event) {
  pthread_mutex_lock(&mutex);
  while (!event->done) pthread_cond_wait(&changed, &mutex);
  const int error = event_error;
  event_error = 0;
  pthread_mutex_unlock(&mutex);
  return error;
}
int cudaEventDestroy(struct event *event) {
  pthread_mutex_lock(&mutex);
  --events;
  pthread_mutex_unlock(&mutex);
  free(event);
  return 0;
}
const char *cudaGetErrorString(int error) {
  return error == kSticky ? "an illegal memory access was encountered"
         : error == 100   ? "no CUDA-capable device is detected"
                          : "out of memory";
}
int cudaGetLastError(void) { return 0; }
