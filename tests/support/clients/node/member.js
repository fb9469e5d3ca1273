// A member of a consumer group: `member.js BOOTSTRAP TOPIC GROUP` prints "PARTITION OFFSET VALUE" for each record, and
// closes at SIGTERM.
const { Kafka, logLevel } = require("kafkajs");

const [brokers, topic, groupId] = process.argv.slice(2);
const kafka = new Kafka({ brokers: brokers.split(","), logLevel: logLevel.ERROR, retry: { retries: 100 } });
const consumer = kafka.consumer({ groupId, sessionTimeout: 6000, heartbeatInterval: 1000 });

async function run() {
  await consumer.connect();
  await consumer.subscribe({ topic, fromBeginning: true });
  await consumer.run({
    eachMessage: async ({ partition, message }) => console.log(partition, message.offset, message.value.toString()),
  });
}

process.on("SIGTERM", () => consumer.disconnect().then(() => process.exit(0)));
run();
